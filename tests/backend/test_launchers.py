"""Ranks of mpiexec and srun: what their variables are read as, and where they meet with nothing set."""

import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import agents
import mpi
from hangs.job import Fault, attempt
from ranks import ranks
from unisono.backend import launchers
from unisono.backend.launchers import RankPlace, launched, rendezvous
from unisono.errors import CollectiveTimeout, UsageError

SECONDS = timedelta(seconds=20)
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),4",
    "SLURM_STEP_NODELIST": "node[07-09]",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "3",
}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA, SLURM, TORCHRUN])
def test_places_are_read_from_the_variables_of_every_launcher(variables: Mapping[str, str]) -> None:
    place = launched({"HOME": "/", **variables})
    assert place is not None
    assert place[1:] == (5, 8, 1, 4)


def test_mpiexec_within_a_step_of_slurm_numbers_the_ranks() -> None:
    both = launched({**SLURM, "SLURM_PROCID": "0", **OPEN_MPI})
    assert both is not None
    assert (both.launcher, both.rank) == ("Open MPI's mpiexec", 5)


def test_where_no_launcher_is_known_there_is_no_place() -> None:
    assert launched({}) is None
    assert launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # of a batch script: not a step's


@pytest.mark.parametrize(("listed", "node", "tasks"), [("4", "0", 4), ("2(x3),1", "2", 2), ("2(x3),1", "3", 1)])
def test_tasks_of_a_node_are_read_from_the_list_of_slurm(listed: str, node: str, tasks: int) -> None:
    place = launched({**SLURM, "SLURM_LOCALID": "0", "SLURM_NODEID": node, "SLURM_STEP_TASKS_PER_NODE": listed})
    assert place is not None
    assert place.local_world_size == tasks


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"PMI_SIZE": "many"}, r"should be whole numbers, but are PMI_RANK=5, PMI_SIZE=many"),
        ({"PMI_RANK": "8"}, r"contradict each other: PMI_RANK=8, PMI_SIZE=8"),
        ({"MPI_LOCALNRANKS": "9"}, r"contradict each other: .*MPI_LOCALNRANKS=9"),
    ],
)
def test_variables_that_are_wrong_are_named(changed: Mapping[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        launched({**HYDRA, **changed})


@pytest.mark.parametrize(
    ("listed", "first"),
    [
        ("node[07-09,12],other", "node07"),
        ("alone", "alone"),
        ("gpu3,gpu1", "gpu3"),
        ("rack[1-2]node[01-04]", "rack1node01"),
        ("n[1,3]-ib", "n1-ib"),
    ],
)
def test_the_first_node_of_slurm_is_that_of_rank_0(listed: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NODELIST", listed)
    assert launchers._first_node() == first


def test_steps_of_a_job_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = set()
    for job in (1, 2, 4_000_000_000):
        for step in (0, 1, 2):
            monkeypatch.setenv("SLURM_JOB_ID", str(job))
            monkeypatch.setenv("SLURM_STEP_ID", str(step))
            ports.add(int(launchers._port_of_job()))
    assert len(ports) == 9
    assert all(10_000 <= port < 30_000 for port in ports)


def under_slurm(rank: int, world_size: int, job: str, init_method: str | None) -> tuple[int, int, list[float]]:
    """A step of Slurm on one node: what srun sets, and nothing else."""
    step = {"SLURM_PROCID": f"{rank}", "SLURM_STEP_NUM_TASKS": f"{world_size}", "SLURM_LOCALID": f"{rank}"}
    node = {"SLURM_STEP_TASKS_PER_NODE": f"{world_size}", "SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0"}
    with patch.dict(os.environ, step | node | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0"}):
        dist.init_process_group("unisono", init_method, timeout=SECONDS)
        x = torch.full((3,), rank + 1.0)
        dist.all_reduce(x)
        found = dist.get_rank(), dist.get_world_size(), x.tolist()
        dist.destroy_process_group()
        assert "RANK" not in os.environ
    return found


@pytest.mark.parametrize("init_method", [None, "launcher://"])
def test_a_step_of_slurm_meets_with_nothing_set(init_method: str | None) -> None:
    found = ranks(3, group=False).run(under_slurm, str(os.getpid()), init_method)
    assert found == [(rank, 3, [6.0] * 3) for rank in range(3)]


PROGRAM = """
import datetime, json, os, sys
import torch, torch.distributed as dist

before, found = dict(os.environ), []
for how in ({}, {"init_method": "launcher://"}):  # the second group meets anew
    dist.init_process_group("unisono", timeout=datetime.timedelta(seconds=30), **how)
    x = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    found.append([dist.get_rank(), dist.get_world_size(), x.tolist()])
    dist.barrier()
    dist.destroy_process_group()
assert before == dict(os.environ)
assert "mpi4py" not in sys.modules
with open(f"{sys.argv[1]}/{found[0][0]}", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.parametrize("kind", mpi.KINDS)
def test_ranks_of_mpiexec_meet_with_nothing_set(kind: str, tmp_path: Path) -> None:
    """Through a shell, too: what starts the ranks is not their parent then."""
    (tmp_path / "program.py").write_text(PROGRAM)
    program = ["sh", "-c", f"{sys.executable} {tmp_path}/program.py {tmp_path}; exit $?"]
    environment = {**mpi.program_environment(kind), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*mpi.one_host(kind, 2), *program], env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert (tmp_path / f"{rank}").read_text() == f"[[{rank}, 2, [3.0, 3.0, 3.0]], [{rank}, 2, [3.0, 3.0, 3.0]]]"
    assert list(tmp_path.glob("unisono-*/*")) == []


def test_two_agents_of_torchrun(tmp_path: Path) -> None:
    """As on two hosts, `--nnodes 2`: each agent starts two of the four ranks."""
    (tmp_path / "program.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('unisono', 'launcher://')\n"
        "x = torch.full((3,), dist.get_rank() + 1.0)\n"
        "dist.all_reduce(x)\n"
        "where = os.environ['GROUP_RANK'], os.environ['LOCAL_RANK']\n"
        "os.write(1, f'{where} {dist.get_rank()} {x.tolist()}\\n'.encode())\n"
        "dist.destroy_process_group()\n"
    )
    meeting = f"--rdzv-id two --rdzv-backend c10d --rdzv-conf store_type=file --rdzv-endpoint {tmp_path}/store"
    command = f"--nnodes 2 --nproc-per-node 2 {meeting} {tmp_path}/program.py"
    started = [agents.start(command, tmp_path / f"{k}") for k in range(2)]
    codes = [agents.end(agent) for agent in started]
    printed = "".join((tmp_path / f"{k}").read_text() for k in range(2))
    assert codes == [0, 0], printed
    lines = sorted(line for line in printed.splitlines() if line.endswith("[10.0, 10.0, 10.0]"))
    assert lines == [f"('{rank // 2}', '{rank % 2}') {rank} [10.0, 10.0, 10.0]" for rank in range(4)]


# What can not meet


SPREAD = RankPlace("Open MPI's mpiexec", 1, 4, 1, 2)


def refusal(place: RankPlace) -> str:
    with pytest.raises(UsageError) as raised:
        next(rendezvous(place, SECONDS))
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", *OPEN_MPI, *HYDRA, *SLURM, *TORCHRUN):
        monkeypatch.delenv(name, raising=False)


class _NoLibrary(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "MPI":
            raise RuntimeError("cannot load MPI library\nlibmpi.so.12: cannot open shared object file")
        raise AttributeError(name)


@pytest.mark.usefixtures("nothing_set")
def test_several_hosts_without_mpi4py_are_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    words = refusal(SPREAD)
    assert words.startswith("rank 1 of 4, started by Open MPI's mpiexec, on several hosts")
    assert 'mpi4py is not installed: pip install "unisono[mpi]", or set MASTER_ADDR' in words
    monkeypatch.setitem(sys.modules, "mpi4py", _NoLibrary("mpi4py"))
    assert "mpi4py finds no MPI library (cannot load MPI library); set MPI4PY_LIBMPI" in refusal(SPREAD)


@pytest.mark.usefixtures("nothing_set")
def test_an_mpi_that_is_not_mpiexecs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(
        COMM_WORLD=SimpleNamespace(Get_size=lambda: 1), Get_library_version=lambda: "MPICH Version: 5.0.2\nmore"
    )
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=other))
    words = refusal(SPREAD)
    assert "mpi4py has loaded MPICH Version: 5.0.2, whose world has 1 of the 4 ranks" in words
    assert "MPI4PY_LIBMPI" in words


@pytest.mark.usefixtures("nothing_set")
def test_half_a_meeting_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert refusal(SPREAD).startswith("MASTER_ADDR is set and MASTER_PORT is not (rank 1 of 4")
    monkeypatch.setenv("MASTER_PORT", "http")
    assert refusal(SPREAD).startswith("MASTER_PORT is 'http', expected a number (rank 1 of 4")


@pytest.mark.usefixtures("nothing_set")
def test_a_rank_0_that_never_comes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "gettempdir", lambda: str(tmp_path))
    alone = RankPlace("MPICH's or Intel MPI's mpiexec", 1, 2, 1, 2)
    with pytest.raises(CollectiveTimeout, match=r"^rank 1 of 2, started by MPICH.*: rank 0 did not come within 0.2 s"):
        next(rendezvous(alone, timedelta(seconds=0.2)))


@pytest.mark.usefixtures("nothing_set")
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"unisono-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert "is not a folder that this user alone may write to" in refusal(RankPlace("srun", 1, 2, 1, 2))


@pytest.mark.usefixtures("nothing_set")
def test_the_scheme_says_what_it_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"launcher:// found no launcher .* PMI_RANK and PMI_SIZE"):
        dist.init_process_group("unisono", "launcher://")
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"launcher:// was given \{'rank': 3.*but this is rank 5 of 8, started by"):
        dist.init_process_group("unisono", "launcher://", rank=3, world_size=8)


@pytest.mark.usefixtures("nothing_set")
def test_the_switch_leaves_torch_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UNISONO_PATCHES", "objects")
    with pytest.raises(ValueError, match="environment variable RANK expected, but not set"):
        dist.init_process_group("unisono")


def refused_alike(rank: int, world_size: int) -> Fault:
    variables = {"PMI_RANK": f"{rank}", "PMI_SIZE": "3", "MPI_LOCALRANKID": f"{rank}", "MPI_LOCALNRANKS": "2"}
    with patch.dict(os.environ, variables), patch.dict(sys.modules, {"mpi4py": None}):
        return attempt(lambda: dist.init_process_group("unisono"))


def test_every_rank_is_told_at_once() -> None:
    for fault in ranks(2, group=False).run(refused_alike):
        fault.says("UsageError", "mpi4py is not installed")
        assert fault.seconds < 5.0

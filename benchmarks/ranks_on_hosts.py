"""Ranks of a benchmark on hosts made of namespaces of one machine; needs root, iproute2 and the tests' hosts.py."""

import importlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

__all__ = ["HOSTS_LIBRARY", "rows_of"]

HOSTS_LIBRARY = Path(__file__).parents[1] / "tests" / "hosts"
"""The folder of hosts.py."""


def rows_of(program: str, library: Path, link: str, shape: str, job: dict[str, Any]) -> list[dict[str, Any]]:
    """One network: starts ``program --rank JOB`` for each rank; rank 0 writes the rows to the file ``job["out"]``.

    ``link``: such as 0.1ms/1gbit; ``shape``: hosts x ranks on each. A rank finds torchrun's variables.
    """
    sys.path.append(str(library))
    latency, rate = link.split("/")
    hosts, local = map(int, shape.split("x"))
    with TemporaryDirectory() as folder, importlib.import_module("hosts").Hosts(hosts, latency, rate) as made:
        out = Path(folder) / "rows.json"
        command = [sys.executable, program, "--rank", json.dumps({**job, "out": str(out)})]
        running = []
        for rank in range(hosts * local):
            place = {"RANK": f"{rank}", "WORLD_SIZE": f"{hosts * local}", "LOCAL_RANK": f"{rank % local}"}
            running.append(made.start(rank // local, command, {**place, "OMP_NUM_THREADS": "1"}))
        for one in running:
            one.wait(timeout=3600)
        return list(json.loads(out.read_text()))

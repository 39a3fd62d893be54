"""MPI between hosts: one machine, split into hosts as in test_hosts.py, under the mpiexecs that are there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import mpi
import unisono
from unisono.errors import UsageError
from unisono.transport.mpi import connect_mpi

PROGRAM = """
import datetime, json, os, sys
import torch, torch.distributed as dist
import unisono
from backend.test_hosts import moved, on_hosts, sums
from unisono.errors import MismatchError

torch.set_num_threads(1)
rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "")))
with on_hosts(rank, (2, 2)):
    options = unisono.Options(between="mpi")
    dist.init_process_group("unisono", timeout=datetime.timedelta(seconds=40), pg_options=options)
    wrong = []
    for numel in (1, 700, 100_000):
        wrong += moved(rank, 4, numel) + sums(rank, 4, numel, torch.float32)
    ends = dist.new_group([0, 3], pg_options=options)
    if rank in (0, 3):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=ends)
        wrong += [] if x.item() == 3 else ["the ends"]
    try:
        dist.all_reduce(torch.ones(2 + rank // 2))
        wrong.append("sizes that differ")
    except MismatchError:
        pass
    dist.barrier()
    dist.destroy_process_group()
with open(f"{sys.argv[1]}/{rank}", "w") as file:
    json.dump(wrong, file)
"""


@pytest.mark.parametrize("kind", mpi.KINDS)
def test_collectives_and_messages_over_mpi(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason='mpi4py is not installed: pip install "unisono[mpi]"')
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [*mpi.one_host(kind, 4), sys.executable, f"{tmp_path}/program.py", str(tmp_path)]
    environment = {**mpi.program_environment(kind), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [json.loads((tmp_path / f"{rank}").read_text()) for rank in range(4)] == [[]] * 4


class Store(dict[str, bytes]):
    """A store that this process keeps for itself."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()


def test_ranks_without_mpi4py_are_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    store = Store()
    with pytest.raises(UsageError) as raised:
        connect_mpi(store, 0, 2)
    words = """Options(between='mpi'): mpi4py is not installed: pip install "unisono[mpi]\""""
    assert str(raised.value) == words == store["mpi/0"].decode()  # the others raise it, too


ALONE = """
from unisono.errors import UsageError
from unisono.transport.mpi import connect_mpi
class Store(dict):
    def set(self, key, value): self[key] = value.encode()
    get = dict.__getitem__
try:
    connect_mpi(Store({"mpi/1": b"alone"}), 0, 2)
except UsageError as error:
    print(error)
"""


def test_ranks_that_mpiexec_has_not_started_are_told_so() -> None:
    pytest.importorskip("mpi4py", reason='mpi4py is not installed: pip install "unisono[mpi]"')
    environment = mpi.program_environment("MPICH")
    done = subprocess.run([sys.executable, "-c", ALONE], env=environment, capture_output=True, text=True, check=False)
    assert "Options(between='mpi'): the 2 ranks were not started by one mpiexec of the MPI" in done.stdout, done.stderr
    assert "its world has 1 of them): start them by mpiexec -n 2; MPI4PY_LIBMPI names" in done.stdout


def test_an_engine_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"between='udp'.: expected 'gloo' or 'mpi'"):
        unisono.Options(between="udp")
    monkeypatch.setenv("UNISONO_BETWEEN", "udp")
    from unisono.backend.options import between_hosts

    with pytest.raises(UsageError, match="UNISONO_BETWEEN is 'udp', expected gloo or mpi"):
        between_hosts(None)

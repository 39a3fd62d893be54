"""A notebook's kernel: groups of one rank in its cells, and workers that it forks, in turn."""

from pathlib import Path
from typing import Any

import pytest

jupyter_client = pytest.importorskip("jupyter_client", reason="needs Jupyter: pip install 'unisono[notebook]'")
pytest.importorskip("ipykernel", reason="needs Jupyter: pip install 'unisono[notebook]'")

PREPARE = """
import multiprocessing, os, socket
import torch, torch.distributed as dist, torch.multiprocessing as mp
torch.set_num_threads(1)

def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

def work(rank, world_size, port):
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("unisono", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(3, 4) * rank).sum().backward()
    x = torch.ones(1 << 18)
    dist.all_reduce(x)
    assert x.sum() == world_size << 18
    dist.barrier()
    dist.destroy_process_group()

port = free_port()
"""
ALONE = """
work(0, 1, port)
"""
BY_TORCH = """
mp.start_processes(work, (2, port), nprocs=2, start_method="fork")
"""
BY_MULTIPROCESSING = """
processes = [multiprocessing.get_context("fork").Process(target=work, args=(rank, 2, port)) for rank in range(2)]
for process in processes:
    process.start()
for process in processes:
    process.join()
assert [process.exitcode for process in processes] == [0, 0]
"""
FAILS = """
dist.init_process_group("unisono", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
dist.all_reduce(torch.ones(3), group=dist.group.WORLD, op="nonsense")
"""
DURING = """
another = free_port()
child = multiprocessing.get_context("fork").Process(target=work, args=(0, 1, another))
child.start()
child.join()
assert child.exitcode == 0
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a cell; what it ended with."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    manager, client = jupyter_client.manager.start_new_kernel(startup_timeout=60)
    said: list[Any] = []

    def run(cell: str) -> tuple[str, list[Any]]:
        said.clear()
        reply = client.execute_interactive(
            cell, timeout=60, output_hook=lambda message: said.append(message["content"])
        )
        return reply["content"]["status"], list(said)

    yield run
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_cells_in_turn(kernel: Any) -> None:
    for cell in (PREPARE, ALONE, BY_TORCH, ALONE, BY_MULTIPROCESSING, BY_TORCH, ALONE):
        status, said = kernel(cell)
        assert status == "ok", said
    assert kernel(FAILS)[0] == "error"  # the kernel keeps the traceback
    for cell in (DURING, BY_TORCH, BY_MULTIPROCESSING, ALONE):
        status, said = kernel(cell)
        assert status == "ok", said

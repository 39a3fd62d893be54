"""Every way to start: env://, tcp://, file://, mp.spawn, a plain Process, and torchrun with an unmodified script."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import agents
from ports import free_port
from ranks import BACKEND, FORKS, ranks

UNMODIFIED = """
import sys
import torch
import torch.distributed as dist

dist.init_process_group(sys.argv[1])
x = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(x)
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}: {x.item():g} {dist.get_backend()}\\n")
assert "unisono" not in globals()
dist.destroy_process_group()
"""


def start_and_sum(rank: int, world_size: int, how: str, place: str) -> tuple[float, str]:
    """Start the default group as told, sum the ranks, end the group."""
    named: dict[str, Any] = {"rank": rank, "world_size": world_size}
    if how == "env://":
        host, port = place.split(":")
        named = {}
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=host, MASTER_PORT=port)
    else:
        named["init_method"] = f"{how}{place}"
    dist.init_process_group(BACKEND, **named)
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    name = dist.get_backend()
    dist.barrier()
    dist.destroy_process_group()
    return x.item(), name


def from_spawn(rank: int, world_size: int, meeting_file: str) -> None:
    result, _ = start_and_sum(rank, world_size, "file://", meeting_file)
    Path(f"{meeting_file}.{rank}").write_text(str(result))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("how", ["env://", "tcp://", "file://"])
def test_init_method(how: str, size: int, tmp_path: Path) -> None:
    place = str(tmp_path / "meeting") if how == "file://" else f"127.0.0.1:{free_port()}"
    expected = (size * (size - 1) / 2, BACKEND)
    assert ranks(size, group=False).run(start_and_sum, how, place) == [expected] * size


def beyond_the_world(rank: int, world_size: int, meeting_file: str) -> str:
    try:
        dist.init_process_group(BACKEND, init_method=f"file://{meeting_file}", rank=5, world_size=2)
    except ValueError as error:
        return str(error)
    finally:
        dist.distributed_c10d._world.group_count = 0  # torch has counted the group that was not made
    return ""


def test_a_rank_beyond_the_world_size(tmp_path: Path) -> None:
    [text] = ranks(1, group=False).run(beyond_the_world, str(tmp_path / "meeting"))
    assert "rank 5 in a world of size 2" in text


def test_mp_spawn(tmp_path: Path) -> None:
    meeting_file = str(tmp_path / "meeting")
    mp.spawn(from_spawn, args=(2, meeting_file), nprocs=2)
    assert [Path(f"{meeting_file}.{rank}").read_text() for rank in range(2)] == ["1.0", "1.0"]


def test_plain_process(tmp_path: Path) -> None:
    meeting_file = str(tmp_path / "meeting")
    processes = [FORKS.Process(target=from_spawn, args=(rank, 2, meeting_file)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert [Path(f"{meeting_file}.{rank}").read_text() for rank in range(2)] == ["1.0", "1.0"]


def test_torchrun_runs_an_unmodified_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNMODIFIED)
    agent = agents.start(f"--standalone --nproc_per_node=2 {script} {BACKEND}", tmp_path / "printed")
    code, said = agents.end(agent), (tmp_path / "printed").read_text()
    assert code == 0, said
    printed = sorted(line for line in said.splitlines() if line.startswith("rank"))
    assert printed == ["rank 0 of 2: 3 unisono", "rank 1 of 2: 3 unisono"]

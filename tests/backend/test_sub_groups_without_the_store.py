"""Sub-groups on one host need no store of torch: it may be gone with rank 0, or be stopped with it."""

import datetime
import signal
import time

import torch
import torch.distributed as dist

from hangs.job import Job, tell
from ports import free_port
from unisono.transport.process import Identity, alive, stopped


def start(rank: int, world_size: int, port: int) -> Identity:
    """Joins the default group over a TCPStore that rank 0 serves; returns rank 0's process."""
    limit, meeting = datetime.timedelta(seconds=20), f"tcp://127.0.0.1:{port}"
    dist.init_process_group("unisono", init_method=meeting, rank=rank, world_size=world_size, timeout=limit)
    found = [Identity.mine()]
    dist.broadcast_object_list(found, 0)
    return found[0]


def total(group: dist.ProcessGroup) -> float:
    x = torch.full((3,), float(dist.get_rank()))
    dist.all_reduce(x, group=group)
    return float(x.sum())


def go_on(rank: int, world_size: int, port: int) -> list[float]:
    """Rank 0 ends; the others make their first call in one group, one more group, and leave one that was never used."""
    first = start(rank, world_size, port)
    made, _ = dist.new_group([1, 2]), dist.new_group([0, 1])
    if rank == 0:
        dist.destroy_process_group()
        return []
    while alive(first):
        time.sleep(0.01)
    found = [total(made), total(dist.new_group([1, 2], use_local_synchronization=True))]
    dist.destroy_process_group()
    return found


def test_the_others_go_on_when_rank_0_has_ended() -> None:
    with Job(go_on, 3, free_port(), group=False) as job:
        assert job.results()[1:] == [[9.0, 9.0]] * 2
        assert [job.errors(rank) for rank in range(3)] == [""] * 3


def stand_still(rank: int, world_size: int, port: int) -> float:
    first = start(rank, world_size, port)
    tell("ready")
    if rank == 0:
        time.sleep(60)
    while not stopped(first):
        time.sleep(0.01)
    return total(dist.new_group([1, 2], use_local_synchronization=True))


def test_a_group_is_made_while_rank_0_is_stopped() -> None:
    with Job(stand_still, 3, free_port(), group=False) as job:
        job.hear("ready")
        job.signal(0, signal.SIGSTOP)
        assert [job.result(rank, seconds=15.0) for rank in (1, 2)] == [9.0, 9.0]

"""Messages whose tensor loses its memory while they are under way: that message fails, all others go on."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import ranks

_RING = 1_000_000  # elements: more than a ring holds
LOST = r"a message could not be copied: its tensor's storage has been resized to 0 bytes while the .* was under way"


def _join(rank: int, world_size: int, path: str, mode: str) -> None:
    os.environ["UNISONO_FUSED"] = mode
    dist.init_process_group("unisono", f"file://{path}", rank=rank, world_size=world_size)
    dist.barrier()


def _sends(rank: int, world_size: int, path: str, mode: str) -> list[float]:
    _join(rank, world_size, path, mode)
    found: list[float] = []
    if rank == 0:
        gone = torch.zeros(4)
        works = [dist.isend(torch.ones(_RING), 1), dist.isend(gone, 1), dist.isend(torch.full((4,), 7.0), 1)]
        gone.untyped_storage().resize_(0)
        dist.barrier()
        with pytest.raises(RuntimeError, match=LOST):
            works[1].wait()
        works[0].wait()
        works[2].wait()
    else:
        dist.barrier()
        for x in (torch.zeros(_RING), torch.zeros(4)):
            dist.recv(x, 0)
            found += [x[0].item(), x[-1].item()]
    dist.barrier()
    dist.destroy_process_group()
    return found


def _receives(rank: int, world_size: int, path: str, mode: str) -> list[float]:
    _join(rank, world_size, path, mode)
    found: list[float] = []
    if rank == 1:
        gone, x = torch.zeros(4), torch.zeros(4)
        work = dist.irecv(gone, 0)
        gone.untyped_storage().resize_(0)
        dist.barrier()
        with pytest.raises(RuntimeError, match=LOST):
            work.wait()
        for tag in (0, 1):  # nothing of it had come: another receive takes the message
            dist.recv(x, 0, tag=tag)
            found.append(x[0].item())
    else:
        dist.barrier()
        for value, tag in ((5.0, 0), (7.0, 1)):
            dist.send(torch.full((4,), value), 1, tag=tag)
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("mode", ["now", "0"])
def test_a_message_that_can_not_be_sent_is_withdrawn(mode: str, tmp_path: Path) -> None:
    assert ranks(2, group=False).run(_sends, str(tmp_path / "meeting"), mode) == [[], [1.0, 1.0, 7.0, 7.0]]


@pytest.mark.parametrize("mode", ["now", "0"])
def test_a_message_that_can_not_be_received_fails_and_the_next_ones_come(mode: str, tmp_path: Path) -> None:
    assert ranks(2, group=False).run(_receives, str(tmp_path / "meeting"), mode) == [[], [5.0, 7.0]]

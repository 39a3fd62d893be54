"""Several hosts: no group may span them, one per host may stand beside a group of Gloo. Rank 2 and up play the second.

What tells hosts apart is the boot id of the kernel; here it is replaced in the ranks of the second host.
"""

from unittest.mock import patch

import torch
import torch.distributed as dist

from hangs.job import Fault, attempt, init
from ranks import ranks

REMEDY = "make a unisono group on each and one of gloo between them"
BOOT_IDS = [f"unisono.{module}.boot_id" for module in ("transport.segment", "backend.roll")]


def passes(rank: int, world_size: int, meeting: str) -> None:
    """Was in another default group before: later groups must not meet under its name, which the other ranks lack."""
    init(meeting, rank, world_size)
    dist.barrier()
    dist.destroy_process_group()


def spans(rank: int, world_size: int, meeting: str) -> tuple[Fault, list[float], Fault]:
    """A default group over both hosts; then Gloo's, in which each host has a group, and one spans both."""
    host = "first" if rank < 2 else "second"
    with patch(BOOT_IDS[0], lambda: host), patch(BOOT_IDS[1], lambda: host):
        default = attempt(lambda: init(meeting, rank, world_size, 20.0))
        init(f"{meeting}-gloo", rank, world_size, 20.0, "gloo")
        inside = [dist.new_group([first, first + 1], backend="unisono") for first in (0, 2)][rank // 2]
        across = dist.new_group([1, 2], backend="unisono")
        x = torch.tensor([float(rank), 1.0])
        dist.all_reduce(x, group=inside)
        dist.barrier()
        late = attempt(lambda: rank in (1, 2) and dist.all_reduce(torch.zeros(1), group=across))
        dist.barrier()
        dist.destroy_process_group()
    return default, x.tolist(), late


def test_a_group_serves_one_host(tmp_path) -> None:
    ranks(2, group=False).run(passes, str(tmp_path / "before"))
    answers = ranks(4, group=False).run(spans, str(tmp_path / "meeting"))
    for rank, (default, _, _) in enumerate(answers):
        other = "[23]" if rank < 2 else "[01]"
        default.says("UsageError", rf"rank {other} \(pid \d+ on \S+\) runs on another host than rank {rank} \(", REMEDY)
        assert default.seconds < 2.0
    assert [total for _, total, _ in answers] == [[1.0, 2.0]] * 2 + [[5.0, 2.0]] * 2
    _, *of_the_span, _ = (late for _, _, late in answers)
    for late, rank, other, kind in zip(of_the_span, (1, 2), (2, 1), ("PeerLostError", "UsageError"), strict=True):
        late.says(kind, rf"rank {other} \(pid \d+ on \S+\) runs on another host than rank {rank} \(", REMEDY)
        assert late.seconds < 2.0

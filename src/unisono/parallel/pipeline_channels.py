"""The ways between ranks of a pipeline that are neighbours: one in each direction.

On the CPU all messages go through one group. An accelerator's communication library runs the messages of a group in the
order they were posted: a receive posted ahead would hold up the send that its own answer depends on, on both sides, for
ever. There the ways are dealt out to several groups, so that a rank has one way at most in each, and nothing waits for
anything else.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.parallel.shards import Group, place
from unisono.schedule.pipeline import PipelineSchedule

__all__ = ["Channels", "deal_out"]


def deal_out(schedule: PipelineSchedule) -> list[list[tuple[int, int]]]:
    """The ways (from, to) between neighbouring ranks, in few lists (a greedy choice), no rank twice in one."""
    stages = schedule.ranks
    pairs = {(stages[a], stages[b]) for a, b in pairwise(stages) if stages[a] != stages[b]}
    lists: list[list[tuple[int, int]]] = []
    for way in sorted(pairs | {(b, a) for a, b in pairs}):
        fits = (ways for ways in lists if not any(rank in taken for rank in way for taken in ways))
        ways = next(fits, None)
        if ways is None:
            lists.append([way])
        else:
            ways.append(way)
    return lists


class Channels:
    """Asynchronous sends and receives, by ranks within the pipeline's group.

    separate: no two ways of a rank share a group. Making one is then collective over the ranks of `group`, which must
    have made as many groups before; these end with the default group.
    """

    def __init__(self, schedule: PipelineSchedule, group: Group, device: torch.device, separate: bool) -> None:
        self._rank, self._group = place(group).rank, group
        self._names = dist.get_process_group_ranks(group)
        self._own: dict[tuple[int, int], Group] = {}
        for ways in deal_out(schedule) if separate else ():
            local = len(self._names) < dist.get_world_size()
            made = dist.new_group(self._names, backend=dist.get_backend(group), use_local_synchronization=local)
            self._own.update(dict.fromkeys(ways, made))
            for way in ways:
                self._open(way, torch.zeros(1, device=device))

    def _open(self, way: tuple[int, int], token: Tensor) -> None:
        """Send the first message of a way. It makes the connection, for which each end waits for the other."""
        source, to = way
        if self._rank in way:
            work = self.send(token, to) if self._rank == source else self.receive(token, source)
            if work is not None:
                work.wait()

    def send(self, tensor: Tensor, to: int) -> dist.Work | None:
        """Begin to send a contiguous tensor, which must stay as it is until the work is done."""
        group = self._own.get((self._rank, to), self._group)
        return dist.isend(tensor, self._names[to], group=group)

    def receive(self, tensor: Tensor, source: int) -> dist.Work | None:
        """Begin to receive into a contiguous tensor."""
        group = self._own.get((source, self._rank), self._group)
        return dist.irecv(tensor, self._names[source], group=group)

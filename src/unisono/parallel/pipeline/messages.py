"""The messages of a pipeline, of any size each; those of torch's stages all have the first microbatch's shape.

Receives are posted ahead of their need, sends are kept until they are done. What travels between two ranks, and in
which order, follows from the sender's row of the schedule, which every rank has: so receives are posted in the order of
the sends, no tags are needed, and no message says what it is.

On the CPU all messages go through one group. An accelerator's communication library runs the messages of a group in the
order they were posted: a receive posted ahead would hold up the send that its own answer depends on, on both sides, for
ever. There each direction between two neighbours gets one of several groups, so that a rank has one direction at most
in each, and a receive is posted when it is needed and no sooner: the host is ahead of the device anyway, and a receive
that is still waiting there would hold up whatever makes the host wait for the device, such as the first use of a
kernel.
"""

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.parallel.pipeline.shapes import Shapes
from unisono.parallel.shards import Group, place
from unisono.schedule.pipeline import Action, PipelineSchedule

__all__ = ["Channels", "PipelineMessages", "group_links", "messages"]

_AHEAD = 2  # receives posted from each peer, beyond the one that is needed


def messages(
    schedule: PipelineSchedule, sender: int, shapes: Shapes, forward_only: bool = False
) -> Iterator[tuple[int, Action]]:
    """The messages a rank sends in a step, in order, each with its destination.

    A message is named by the action that it is for: it brings the input to an F, the gradient of the output to a B.
    """
    for action in schedule.actions[sender]:
        for stage, kind, microbatch in action.parts:
            if kind == "F" and stage < schedule.num_stages - 1:
                to = Action(stage + 1, "F", microbatch)
            elif kind == "B" and shapes.has_gradient(stage) and not forward_only:
                to = Action(stage - 1, "B", microbatch)
            else:
                continue
            if schedule.ranks[to.stage] != sender:
                yield schedule.ranks[to.stage], to


def group_links(schedule: PipelineSchedule) -> list[list[tuple[int, int]]]:
    """The links (from, to) between neighbouring ranks, in few lists (a greedy choice), no rank twice in one."""
    stages = schedule.ranks
    pairs = {(stages[a], stages[b]) for a, b in pairwise(stages) if stages[a] != stages[b]}
    lists: list[list[tuple[int, int]]] = []
    for link in sorted(pairs | {(b, a) for a, b in pairs}):
        fits = (links for links in lists if not any(rank in taken for rank in link for taken in links))
        links = next(fits, None)
        if links is None:
            lists.append([link])
        else:
            links.append(link)
    return lists


class Channels:
    """Asynchronous sends and receives, by ranks within the pipeline's group, of which this rank is a member.

    separate: no two links of a rank share a group. Making one is then collective over the ranks of `group`, which must
    have made as many groups before; these end with the default group.
    """

    def __init__(self, schedule: PipelineSchedule, group: Group, device: torch.device, separate: bool) -> None:
        self._rank, self._group = place(group).rank, group
        self._global_ranks = dist.get_process_group_ranks(group)
        self._own: dict[tuple[int, int], Group] = {}
        for links in group_links(schedule) if separate else ():
            local = len(self._global_ranks) < dist.get_world_size()
            made = dist.new_group(self._global_ranks, backend=dist.get_backend(group), use_local_synchronization=local)
            self._own.update(dict.fromkeys(links, made))
            for link in links:
                self._open(link, torch.zeros(1, device=device))

    def _open(self, link: tuple[int, int], token: Tensor) -> None:
        """Send the first message of a link. It makes the connection, for which each end waits for the other."""
        source, to = link
        if self._rank in link:
            (self.send(token, to) if self._rank == source else self.receive(token, source)).wait()

    def send(self, tensor: Tensor, to: int) -> dist.Work:
        """Begin to send a contiguous tensor, which must stay as it is until the work is done."""
        group = self._own.get((self._rank, to), self._group)
        return cast("dist.Work", dist.isend(tensor, self._global_ranks[to], group=group))

    def receive(self, tensor: Tensor, source: int) -> dist.Work:
        """Begin to receive into a contiguous tensor."""
        group = self._own.get((source, self._rank), self._group)
        return cast("dist.Work", dist.irecv(tensor, self._global_ranks[source], group=group))


class PipelineMessages:
    """The messages of one step, as one rank sees them."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        rank: int,
        shapes: Shapes,
        channels: Channels,
        device: torch.device,
        forward_only: bool = False,
    ) -> None:
        self._schedule, self._rank, self._shapes = schedule, rank, shapes
        self._channels, self._device = channels, device
        self._ahead = _AHEAD if device.type == "cpu" else 0
        self._expected: dict[int, deque[Action]] = {}
        self._arriving: dict[Action, tuple[dist.Work | None, Tensor]] = {}
        self._waiting: dict[int, int] = {}  # posted and not yet taken, by peer
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()
        for peer in range(schedule.world_size):
            if peer != rank:
                sent = messages(schedule, peer, shapes, forward_only)
                self._expected[peer] = deque(message for to, message in sent if to == rank)
                self._waiting[peer] = 0
                self._post(peer)

    def take(self, action: Action) -> Tensor | None:
        """Wait for what an F or a B needs from a neighbouring stage; None at the ends of the pipeline."""
        ends = action.stage == (0 if action.kind == "F" else self._schedule.num_stages - 1)
        if ends or (action.kind == "B" and not self._shapes.has_gradient(action.stage + 1)):
            return None
        peer = self._schedule.ranks[action.stage + (-1 if action.kind == "F" else 1)]
        while action not in self._arriving:
            self._post_one(peer)
        work, tensor = self._arriving.pop(action)
        if work is not None:
            work.wait()
        if peer != self._rank:
            self._waiting[peer] -= 1
            self._post(peer)
        return tensor

    def send(self, message: Action, tensor: Tensor) -> None:
        """Begin to send; within the rank, hand over."""
        peer = self._schedule.ranks[message.stage]
        if peer == self._rank:
            self._arriving[message] = (None, tensor)
            return
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()
        tensor = tensor.contiguous()
        self._leaving.append((self._channels.send(tensor, peer), tensor))

    def finish(self) -> None:
        """Wait until all that was sent is out."""
        for work, _ in self._leaving:
            work.wait()
        self._leaving.clear()

    def _post(self, peer: int) -> None:
        while self._expected[peer] and self._waiting[peer] < self._ahead:
            self._post_one(peer)

    def _post_one(self, peer: int) -> None:
        """Post the receive of the next message from a peer."""
        message = self._expected[peer].popleft()
        border = message.stage + (message.kind == "B")  # a gradient has the form of what entered the stage after
        tensor = self._shapes.entering[border][message.microbatch].empty(self._device)
        self._arriving[message] = (self._channels.receive(tensor, peer), tensor)
        self._waiting[peer] += 1

"""The messages of a pipeline: receives are posted ahead of their need, sends are kept until they are done.

What travels between two ranks, and in which order, follows from the sender's row of the schedule, which every rank has:
so receives are posted in the order of the sends, no tags are needed, and no message says what it is.

On an accelerator a receive is posted when it is needed and no sooner. The host is ahead of the device anyway, and a
receive that is still waiting there would hold up, for ever, whatever makes the host wait for the device, such as the
first use of a kernel.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.parallel.pipeline_channels import Channels
from unisono.parallel.pipeline_shapes import Shapes
from unisono.schedule.pipeline import Action, PipelineSchedule

__all__ = ["Letter", "PipelineMail", "letters"]

_AHEAD = 2  # receives under way from each peer, beyond the one that is needed


class Letter(NamedTuple):
    """What a stage is sent: the input (F) or the gradient of its output (B) for one microbatch."""

    stage: int
    kind: str
    microbatch: int


def letters(
    schedule: PipelineSchedule, sender: int, shapes: Shapes, forward_only: bool = False
) -> Iterator[tuple[int, Letter]]:
    """What a rank sends to others in a step, in order, with the rank that gets it."""
    for action in schedule.actions[sender]:
        for stage, kind, microbatch in action.parts:
            if kind == "F" and stage < schedule.num_stages - 1:
                to = Letter(stage + 1, "F", microbatch)
            elif kind == "B" and shapes.has_gradient(stage) and not forward_only:
                to = Letter(stage - 1, "B", microbatch)
            else:
                continue
            if schedule.ranks[to.stage] != sender:
                yield schedule.ranks[to.stage], to


class PipelineMail:
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
        self._expected: dict[int, deque[Letter]] = {}
        self._arriving: dict[Letter, tuple[dist.Work | None, Tensor]] = {}
        self._waiting: dict[int, int] = {}  # posted and not yet taken, by peer
        self._leaving: deque[tuple[dist.Work | None, Tensor]] = deque()
        for peer in range(schedule.world_size):
            if peer != rank:
                sent = letters(schedule, peer, shapes, forward_only)
                self._expected[peer] = deque(letter for to, letter in sent if to == rank)
                self._waiting[peer] = 0
                self._post(peer)

    def take(self, action: Action) -> Tensor | None:
        """Wait for what an F or a B needs from a neighbouring stage; None at the ends of the pipeline."""
        letter = Letter(*action)
        ends = letter.stage == (0 if letter.kind == "F" else self._schedule.num_stages - 1)
        if ends or (letter.kind == "B" and not self._shapes.has_gradient(letter.stage + 1)):
            return None
        peer = self._schedule.ranks[letter.stage + (-1 if letter.kind == "F" else 1)]
        while letter not in self._arriving:
            self._post_one(peer)
        work, tensor = self._arriving.pop(letter)
        if work is not None:
            work.wait()
        if peer != self._rank:
            self._waiting[peer] -= 1
            self._post(peer)
        return tensor

    def send(self, letter: Letter, tensor: Tensor) -> None:
        """Begin to send; within the rank, hand over."""
        peer = self._schedule.ranks[letter.stage]
        if peer == self._rank:
            self._arriving[letter] = (None, tensor)
            return
        while self._leaving and ((work := self._leaving[0][0]) is None or work.is_completed()):
            self._leaving.popleft()
        tensor = tensor.contiguous()
        self._leaving.append((self._channels.send(tensor, peer), tensor))

    def finish(self) -> None:
        """Wait until all that was sent is out."""
        for work, _ in self._leaving:
            if work is not None:
                work.wait()
        self._leaving.clear()

    def _post(self, peer: int) -> None:
        while self._expected[peer] and self._waiting[peer] < self._ahead:
            self._post_one(peer)

    def _post_one(self, peer: int) -> None:
        """Post the receive of the next message from a peer."""
        letter = self._expected[peer].popleft()
        border = letter.stage + (letter.kind == "B")  # a gradient has the form of what entered the stage after
        tensor = self._shapes.entering[border][letter.microbatch].empty(self._device)
        self._arriving[letter] = (self._channels.receive(tensor, peer), tensor)
        self._waiting[peer] += 1

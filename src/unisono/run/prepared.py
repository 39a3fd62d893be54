"""Calls prepared once per kind, so that a call of that kind costs little: tickets, and orders for the loops."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from unisono.run.desk import Order
from unisono.run.programs import Program
from unisono.run.task import Task
from unisono.transport.futex import LINGER
from unisono.watch.call import Call

__all__ = ["BRIEFLY", "Ordered", "Prepared", "Ticket", "brief"]

BRIEFLY, _SLOWLY = 2e-5, 2.5e-10  # s, s per byte

_Step = Callable[[int, torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True, slots=True)
class Ticket:
    """A kind of call of one meeting, prepared: what peers compare; what is done before the meeting and after it.

    Both steps take the half of the board, the output and the input (the same tensor twice for operations in place).
    """

    call: Call
    stage: _Step
    collect: _Step

    def rest(self, half: int, output: torch.Tensor, tensor: torch.Tensor) -> Program:
        """What is left once the peers have come."""
        self.collect(half, output, tensor)
        yield from ()


Prepared = Ticket | Order


class Ordered(Task):
    """The call of an order that waits for its turn."""

    __slots__ = ("order", "output", "tensor")

    def __init__(self, order: Order, output: torch.Tensor, tensor: torch.Tensor, timeout: float) -> None:
        super().__init__(order.call, None, [output], timeout)
        self.order, self.output, self.tensor = order, output, tensor


def brief(call: Call) -> float:
    """Seconds that a call in the background may wait for its peers at once: about what its data takes to move."""
    return min(LINGER, BRIEFLY + _SLOWLY * call.nbytes)

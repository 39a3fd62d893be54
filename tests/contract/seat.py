"""One rank's seat at one call: the case, this rank's tensors, and what is expected of them afterwards."""

import datetime
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from contract import reference
from contract.layouts import Laid, lay
from contract.values import FACTOR, data, reduce_op

__all__ = ["MODES", "Case", "Circle", "Seat"]

PATIENCE = datetime.timedelta(seconds=20)
MODES = ("sync", "wait", "timed", "future", "then", "poll")


@dataclass(frozen=True)
class Case:
    """One point of the contract; the same object on every rank."""

    dtype: torch.dtype = torch.float32
    op: str = ""  # reduce op, empty where data only moves
    shape: tuple[int, ...] = (7,)
    layout: str = "contiguous"  # of inputs and of tensors changed in place
    result_layout: str = "contiguous"  # of results
    root: int = 0  # index within the group
    mode: str = "sync"
    form: int = 0  # which way of saying the same: lists of uneven sizes, stacked instead of concatenated results
    seed: int = 0


class Circle(NamedTuple):
    """A group: torch's object, its members' global ranks in group order, this rank's index in it."""

    group: Any
    members: list[int]
    me: int


class Seat:
    """Gives one operation its tensors, makes the call in the case's mode, and collects what is wrong."""

    def __init__(self, circle: Circle, case: Case) -> None:
        self.case, self.circle = case, circle
        self.size, self.me, self.root = len(circle.members), circle.me, case.root
        self.op = reduce_op(case.op) if case.op else None
        self.expected: list[tuple[str, Laid, torch.Tensor | None]] = []
        self.problems: list[str] = []

    def values(self, member: int, part: int = 0, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return what `member` contributes as its `part`-th tensor (rows and parts alike if it will be expanded)."""
        shape = self.case.shape if shape is None else shape
        if self.case.layout == "expanded" and shape:
            row = data(self.case.dtype, math.prod(shape[1:]), self.case.seed * 4096 + member, self.case.op)
            return row.view(1, *shape[1:]).expand(shape)
        seed = self.case.seed * 4096 + member * 64 + part
        return data(self.case.dtype, math.prod(shape), seed, self.case.op).view(shape)

    def reduced(self, part: int = 0, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Return the reduction of everybody's `part`-th tensor."""
        inputs = [self.values(member, part, shape).contiguous() for member in range(self.size)]
        return reference.reduce(self.case.op, inputs, FACTOR)

    def give(self, values: torch.Tensor, becomes: torch.Tensor | None = None) -> torch.Tensor:
        """Make an input tensor holding `values`; afterwards it must be unchanged, or hold `becomes`."""
        laid = lay(self.case.layout, tuple(values.shape), self.case.dtype, values)
        self.expected.append(("input" if becomes is None else "result", laid, becomes))
        return laid.view

    def take(self, wanted: torch.Tensor) -> torch.Tensor:
        """Make a result tensor that must hold `wanted` afterwards."""
        laid = lay(self.case.result_layout, tuple(wanted.shape), self.case.dtype)
        self.expected.append(("result", laid, wanted))
        return laid.view

    def at_root(self, word: str) -> dict[str, int]:
        """Name the root as a global rank (src=, dst=) or as a rank of the group (group_src=, group_dst=)."""
        if self.case.seed % 2:
            return {f"group_{word}": self.root}
        return {word: self.circle.members[self.root]}

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Call the collective on this group in the case's mode and see it to its end."""
        options["group"] = self.circle.group
        if self.case.mode == "sync":
            if function(*args, **options) is not None:
                self.problems.append("a synchronous call returned something")
            return
        work = function(*args, async_op=True, **options)
        self.finish(work)
        if not work.is_completed():
            self.problems.append(f"not is_completed() after {self.case.mode}")

    def finish(self, work: dist.Work) -> None:
        """Wait for the work in the way the mode says."""
        seen: list[bool] = []
        match self.case.mode:
            case "wait":
                work.wait()
            case "timed":
                work.wait(PATIENCE)
            case "future":
                work.get_future().wait()
            case "then":
                work.get_future().then(lambda future: seen.append(future.done())).wait()
                if seen != [True]:
                    self.problems.append(f"the callback of then saw {seen}")
            case "poll":
                deadline = time.monotonic() + PATIENCE.total_seconds()
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        raise TimeoutError("never is_completed() without wait")
                    time.sleep(0.0002)

    def settle(self) -> list[str]:
        """Compare every tensor with what was expected of it; return the complaints."""
        rtol = reference.tolerance(self.case.op, self.case.dtype) if self.case.op == "AVG" else 0.0
        for index, (role, laid, wanted) in enumerate(self.expected):
            if complaint := laid.check(wanted, rtol):
                self.problems.append(f"{role} {index}: {complaint}")
        where = f"rank {self.me} of {self.circle.members}"
        return [f"{where}, {self.case}: {problem}" for problem in self.problems]

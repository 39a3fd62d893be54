"""Random programs of collectives, executed by all ranks and compared, call by call, with the reference.

What single operations do not show: staging areas shared by operations of different kinds, works that are waited for
late and in another order than issued, groups whose calls interleave.
"""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from contract.operations import OPERATIONS, REDUCING
from contract.seat import Case, Circle, Seat
from ranks import ranks

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
WHOLE_WORLD = 0


class Call(NamedTuple):
    """One line of a program: an operation, its case, which group, and how many lines later it is waited for."""

    operation: str
    case: Case
    group: int
    patience: int


class Deferred(Seat):
    """A seat whose asynchronous work is waited for later."""

    work: dist.Work | None = None

    def finish(self, work: dist.Work) -> None:
        self.work = work

    def call(self, function: Any, *args: Any, **options: Any) -> None:
        options["group"] = self.circle.group
        if self.case.mode == "sync":
            function(*args, **options)
        else:
            self.work = function(*args, async_op=True, **options)

    def end(self) -> list[str]:
        if self.work is not None:
            self.work.wait()
        return self.settle()


def groups_of(world_size: int) -> list[list[int]]:
    """Return the world, its first and last n-1 ranks, and the even ones; those of one rank only count too."""
    everyone = list(range(world_size))
    return [everyone, everyone[:-1] or everyone, everyone[1:] or everyone, everyone[::2]]


@st.composite
def calls(draw: st.DrawFn, world_size: int) -> Call:
    """Draw one line."""
    group = draw(st.integers(0, 3))
    size = len(groups_of(world_size)[group])
    operation = draw(st.sampled_from(sorted(OPERATIONS)))
    patience = draw(st.integers(0, 6))
    count = draw(st.sampled_from([0, 1, 7, 1000, 2049, 20_000, 70_001]))
    case = Case(
        dtype=draw(st.sampled_from(DTYPES)),
        op=draw(st.sampled_from(["SUM", "MAX", "MIN", "PRODUCT"])) if operation in REDUCING else "",
        shape=(count,),
        layout=draw(st.sampled_from(["contiguous", "contiguous", "step", "column"])),
        result_layout=draw(st.sampled_from(["contiguous", "contiguous", "step"])),
        root=draw(st.integers(0, size - 1)),
        mode="wait" if patience else "sync",
        form=draw(st.integers(0, 1)) if count <= 2049 else 0,
        seed=draw(st.integers(0, 1000)),
    )
    return Call(operation, case, group, patience)


def programs(world_size: int) -> st.SearchStrategy[list[Call]]:
    return st.lists(calls(world_size), min_size=5, max_size=30)


def execute(rank: int, world_size: int, program: list[Call]) -> list[str]:
    """Run the program on this rank; return what differed from the reference."""
    members = groups_of(world_size)
    groups = [None, *(dist.new_group(group) for group in members[1:])]
    problems: list[str] = []
    pending: list[tuple[int, Deferred]] = []
    for line, (operation, case, group, patience) in enumerate(program):
        for due in [entry for entry in pending if entry[0] <= line]:
            problems += due[1].end()
            pending.remove(due)
        if rank in members[group]:
            seat = Deferred(Circle(groups[group], members[group], members[group].index(rank)), case)
            OPERATIONS[operation](seat)
            pending.append((line + patience, seat))
    for _, seat in reversed(pending):
        problems += seat.end()
    for number, group in enumerate(members):
        if number != WHOLE_WORLD and rank in group:
            dist.destroy_process_group(groups[number])
    return problems[:5]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_random_programs(world_size: int) -> None:
    @settings(
        max_examples=25 if world_size < 8 else 12,
        phases=[Phase.generate],  # to shrink a program that hangs would take its timeout each time
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(programs(world_size))
    def run(program: list[Call]) -> None:
        assert ranks(world_size).run(execute, program, timeout=30) == [[]] * world_size

    run()

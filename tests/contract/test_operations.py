"""Every operation × reduce op × dtype × layout × root × mode × group, at every world size."""

import itertools
import warnings
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from _pytest.mark import ParameterSet

from contract.cases import MANY, STREAMS, circles
from contract.conftest import WORLD_SIZES
from contract.operations import OPERATIONS
from contract.seat import Case, Circle, Seat
from ranks import ranks


def walk(rank: int, world_size: int, operation: str, stream: str) -> tuple[int, list[str]]:
    """Walk the operation along the stream; return how many cases were tried and what was wrong (at most 8 lines)."""
    warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
    problems: list[str] = []
    tried = 0
    for circle in enter(rank, world_size, stream):
        for case in STREAMS[stream](operation, len(circle.members)):
            seat = Seat(circle, case)
            try:
                OPERATIONS[operation](seat)
            except Exception as error:
                error.add_note(f"rank {rank}: {operation} in {circle.members}, {case}")
                raise
            problems += seat.settle()
            tried += 1
    return tried, problems[:8]


def enter(rank: int, world_size: int, stream: str) -> Iterator[Circle]:
    """Yield the groups of this stream that this rank is a member of."""
    if stream != "groups":
        yield Circle(None, list(range(world_size)), rank)
        return
    made = [(dist.new_group(members), members) for members in circles(world_size)]
    mine = [(group, members) for group, members in made if rank in members]
    for group, members in mine:
        yield Circle(group, members, members.index(rank))
    for group, _ in reversed(mine):
        dist.destroy_process_group(group)


def streams_of(operation: str) -> list[str]:
    return ["modes", "groups"] if operation == "barrier" else list(STREAMS)


POINTS = [(operation, stream) for operation in OPERATIONS for stream in streams_of(operation)]


def points() -> Iterator[ParameterSet]:
    """Every operation with every stream, at every world size; of those above three ranks, at one of them by turns.

    Each is a world that does not fit two cores, and meets every stream, and every operation that has data. The other
    turns are soaked.
    """
    large = [world_size for world_size in WORLD_SIZES if world_size > MANY]
    for world_size, (turn, point) in itertools.product(WORLD_SIZES, enumerate(POINTS)):
        soaked = world_size in large and turn % len(large) != large.index(world_size)
        marks = [pytest.mark.soak] if soaked else []
        yield pytest.param(world_size, *point, marks=marks, id="-".join([f"{world_size}-ranks", *point]))


@pytest.mark.parametrize(("world_size", "operation", "stream"), list(points()), indirect=["world_size"])
def test_operation(world_size: int, operation: str, stream: str) -> None:
    outcomes = ranks(world_size).run(walk, operation, stream)
    assert not [problem for _, problems in outcomes for problem in problems]
    assert all(tried for tried, _ in outcomes)


def test_the_streams_reach_every_value_of_every_axis() -> None:
    """Guards the suite itself: a rotation that skips a layout, mode or root would go unseen."""
    for operation in OPERATIONS:
        cases = [case for stream in streams_of(operation) for case in STREAMS[stream](operation, 4)]
        assert {case.root for case in cases} == {0, 1, 2, 3}
        assert {case.mode for case in cases} == {"sync", "wait", "timed", "future", "then", "poll"}
        assert {case.form for case in cases} == {0, 1}
        assert all(isinstance(case, Case) for case in cases)

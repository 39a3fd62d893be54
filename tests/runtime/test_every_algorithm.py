"""Every algorithm, every collective, 1 to 8 ranks: the reference's values, over the loopback."""

from dataclasses import replace
from itertools import chain

import pytest

from runtime.cases import FACTOR, REDUCING, Case, Tensors, every_case, joined, problems
from unisono.runtime.run import run_over
from unisono.schedule import Schedule
from unisono.transport.loopback import Loopback, run_loopback

VARIANTS = [{"numel": 13}, {"numel": 2, "chunks": 4}]
BY_TURNS = (6, 8)  # ranks, each for half of the cases


def over(transport: Loopback, cases: list[Case]) -> list[str]:
    """Run all cases as one rank."""

    def one(case: Case, schedule: Schedule, sources: Tensors, results: Tensors) -> None:
        options = {"op": case.op, "factor": FACTOR, "deterministic": case.deterministic}
        given, got = joined(sources), joined(results)
        run_over(schedule, given, transport, got, **options)  # type: ignore[arg-type]
        for blocks, whole in ((sources, given), (results, got)):
            for block, part in zip(
                blocks, () if whole is None else whole.split(case.numel or 1), strict=bool(case.numel)
            ):
                block.copy_(part)

    return [line for case in cases for line in problems(case, transport.rank, one)]


@pytest.mark.parametrize(
    "world_size", [1, 2, 3, 4, 5, 6, 8, *(pytest.param(n, marks=pytest.mark.soak) for n in (7, 9))]
)
def test_gives_the_references_values(world_size: int) -> None:
    cases = list(every_case(world_size, VARIANTS))
    cases += [replace(case, deterministic=True) for case in cases if case.collective in REDUCING]
    if world_size in BY_TURNS:
        cases = cases[BY_TURNS.index(world_size) :: len(BY_TURNS)]
    assert list(chain(*run_loopback(world_size, over, cases))) == []


def test_no_elements_at_all() -> None:
    cases = list(every_case(3, [{"numel": 0}]))
    assert list(chain(*run_loopback(3, over, cases))) == []

"""Every algorithm, every collective, 1 to 9 ranks: the reference's values, over the loopback."""

import pytest
import torch

from run.cases import FACTOR, REDUCING, Case, Tensors, every_case, problems
from unisono.run.front import run
from unisono.schedule import Schedule
from unisono.transport.loopback import Loopback, run_loopback

SIZES = [{"numel": 13}, {"numel": 2, "uneven": True, "chunks": 4}, {"numel": 0}]


def over(transport: Loopback, cases: list[Case]) -> list[str]:
    """Run all cases as one rank."""

    def one(case: Case, schedule: Schedule, sources: Tensors, results: Tensors) -> None:
        run(
            schedule,
            sources,
            transport,
            results,
            op=case.op,
            factor=FACTOR,
            sizes=case.sizes,
            deterministic=case.deterministic,
        )

    return [line for case in cases for line in problems(case, transport.rank, one)]


@pytest.mark.parametrize("world_size", range(1, 10))
def test_gives_the_references_values(world_size: int) -> None:
    cases = list(every_case(world_size, SIZES))
    cases += [case for case in every_case(world_size, [{"deterministic": True}]) if case.collective in REDUCING]
    assert sum(run_loopback(world_size, over, cases), []) == []

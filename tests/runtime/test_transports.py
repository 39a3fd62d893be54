"""Every algorithm over another wire, with real processes: a group's own point to point messages."""

from dataclasses import replace
from itertools import chain

import pytest

from ranks import ranks
from runtime.cases import REDUCING, every_case
from runtime.test_every_algorithm import VARIANTS, over
from unisono.transport.torch_p2p import TorchP2P

LARGE = {"numel": 300_000}  # more than any buffer of a message on its way


def over_a_group(rank: int, world_size: int) -> list[str]:
    variants = [*VARIANTS, {"numel": 0}, LARGE][: 4 if world_size == 3 else 3]
    cases = list(every_case(world_size, variants))
    cases += [replace(case, deterministic=True) for case in cases if case.collective in REDUCING]
    transport = TorchP2P()
    return [line[:400] for line in over(transport, cases)]


@pytest.mark.parametrize("backend", ["gloo", "unisono"])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_every_algorithm_over_a_group(world_size: int, backend: str) -> None:
    assert list(chain(*ranks(world_size, backend=backend).run(over_a_group))) == []

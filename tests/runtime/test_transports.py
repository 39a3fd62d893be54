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


KEPT = [(2, "unisono"), (3, "gloo"), (3, "unisono"), (4, "gloo")]
"""What a message carries is the transport's, how many ranks there are the loopback's: test_every_algorithm.py."""
SOAKED = [
    pytest.param(n, backend, marks=pytest.mark.soak)
    for n in (2, 3, 4, 5, 8)
    for backend in ("gloo", "unisono")
    if (n, backend) not in KEPT
]


@pytest.mark.parametrize(("world_size", "backend"), [*KEPT, *SOAKED])
def test_every_algorithm_over_a_group(world_size: int, backend: str) -> None:
    assert list(chain(*ranks(world_size, backend=backend).run(over_a_group))) == []

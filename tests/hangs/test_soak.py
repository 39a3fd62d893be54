"""Programs of random calls that do end: every value is right, and nobody cries wolf."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from ranks import ranks

SOAK = str(Path(__file__).parents[2] / "benchmarks" / "soak")
LARGE = (1, 100, 900_000)  # the last does not fit into a ring: its sender waits for the receiver


def walks(rank: int, world_size: int, *args: Any) -> tuple[int, list[str], str]:
    """benchmarks/soak/soak.py, which runs the long version."""
    sys.path.append(SOAK)
    try:
        result: tuple[int, list[str], str] = importlib.import_module("soak").walk(rank, world_size, *args)
    finally:
        sys.path.remove(SOAK)
    return result


def test_two_thousand_small_calls() -> None:
    results = ranks(4).run(walks, 2000, 11, timeout=100)
    assert [(wrong, alarm) for _, wrong, alarm in results] == [([], "")] * 4
    assert min(calls for calls, _, _ in results) > 500


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_long_waits_are_no_deadlocks(seed: int) -> None:
    """Sleeps so long that the others look for a cycle, again and again, while all are blocked but one."""
    results = ranks(4).run(walks, 24, seed, (0.15, 1.0), LARGE, timeout=100)
    assert [(wrong, alarm) for _, wrong, alarm in results] == [([], "")] * 4

"""The agreement of `unisono.shrink` over a table that tells when ranks publish and leave."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.backend.survivors import _DONE, _JOINED, _PROPOSES, State, Survivors


class LeavesBetween:
    """Three ranks, of which this is 0: rank 1 is done and leaves the old group between a look at its state and the
    look whether it lives; rank 2 joins just before.
    """

    size, rank = 3, 0

    def __init__(self, far: bool) -> None:
        self.mine, self.left, self._far = State(), False, far

    def publish(self, state: State) -> None:
        self.mine = state

    def read(self, rank: int) -> State:
        phase = {0: self.mine.phase, 1: _DONE if self.left else _JOINED, 2: _JOINED if self.left else _PROPOSES}[rank]
        return State(phase, self.mine.attempt, 0, "", "")

    def gone(self, rank: int) -> Any:
        self.left = self.left or self.mine.phase == _JOINED
        return SimpleNamespace(words=f"rank {rank} goes on in another group") if self.left and rank == 1 else None

    def far(self, rank: int) -> bool:
        return self._far

    def name(self, rank: int) -> int:
        return rank

    def address(self, ranks: Sequence[int]) -> str:
        return "127.0.0.1"


@pytest.mark.parametrize("far", [False, True])
def test_who_is_done_and_has_left_is_not_lost(far: bool) -> None:
    table: Any = LeavesBetween(far)
    survivors = Survivors(table, "the default group", [], 3, 5.0, lambda: 1)
    joins: list[str] = []
    survivors.agree(lambda: joins.append(survivors.mark))
    assert (survivors.lost, joins, table.mine.phase) == ({}, ["0/0"], _DONE)

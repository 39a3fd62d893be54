"""The board seen by one rank alone: what it does while nobody comes."""

import os
import time

import pytest

from unisono.transport.board import Board
from unisono.transport.segment import create


class Shelf:
    """A store of one process."""

    def set(self, key: str, value: str) -> None: ...


def test_lingering_ends_soon_where_each_yield_takes_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a hundred yields would keep a waiter from looking whether its peers live for a second."""
    segment, fd = create(Shelf(), 2, "lonely")
    os.close(fd)
    board = Board(segment, 0)
    board.arrive()
    yields: list[None] = []

    def slow() -> None:
        yields.append(time.sleep(0.008))

    monkeypatch.setattr("os.sched_yield", slow)
    assert not board.linger()
    assert len(yields) == 1

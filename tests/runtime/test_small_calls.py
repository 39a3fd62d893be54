"""A small call costs one line of the cache: its data lies beside the counter; a header that is there stays there."""

import ctypes
import dataclasses
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono
from ranks import ranks
from unisono.backend.operations import Builder
from unisono.runtime import words as w
from unisono.runtime.call import Call
from unisono.runtime.collectives import CollectiveQueue
from unisono.runtime.interpreter import interpreter
from unisono.runtime.torch_ops import _PRIMITIVES
from unisono.transport.board import Board
from unisono.transport.layout import LINE, Layout
from unisono.transport.segment import create
from unisono.watch.monitor import GroupMonitor


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 7, 64])
def test_inline_data_lies_in_the_line_of_its_counter_and_touches_nothing_there(world_size: int) -> None:
    layout = Layout(world_size)
    for parity in (0, 1):
        counters = {layout.counter(parity + 2 * k) for k in range(layout.COUNTERS // 2)}
        taken = {at + byte for at in counters for byte in range(8)}
        assert len(taken) == 8 * len(counters)
        for rank in range(world_size):
            first = layout.inline_at(parity, rank)
            mine = set(range(first, first + layout.inline))
            assert not mine & taken
            assert first % 8 == 0
            taken |= mine
        assert {at // LINE for at in taken} == {layout.counter(parity) // LINE}
    assert layout.counter(0) // LINE != layout.counter(1) // LINE
    assert layout.counter(1) + LINE <= layout.bells


def staged(rank: int, world_size: int, numel: int) -> tuple[bool, bool, list[float]]:
    """Whether a call left its data beside the counter, whether in staging memory, and the result."""
    queue: Any = dist.distributed_c10d._get_default_group()._group.collectives  # type: ignore[attr-defined]
    segment, layout = queue._segment, queue._segment.layout
    x = torch.full((numel,), float(10 * numel + rank))  # no other call's numbers
    mine = bytes(x[:1].numpy())
    dist.all_reduce(x)
    beside = [layout.inline_at(parity, rank) for parity in (0, 1)]
    apart = [layout.stages + (parity * world_size + rank) * layout.area for parity in (0, 1)]
    found = [any(bytes(segment.raw[at : at + 4]) == mine for at in places) for places in (beside, apart)]
    dist.barrier()
    return found[0], found[1], [x.min().item(), x.max().item()]


@pytest.mark.parametrize(("world_size", "numel", "inline"), [(2, 1, True), (2, 6, True), (2, 7, False), (3, 4, True)])
def test_what_fits_is_staged_beside_the_counter(world_size: int, numel: int, inline: bool) -> None:
    total = sum(10.0 * numel + rank for rank in range(world_size))
    for beside, apart, values in ranks(world_size).run(staged, numel):
        assert (beside, apart) == (inline, not inline)
        assert values == [total, total]


def by_name(rank: int, world_size: int, names: list[str]) -> list[list[float]]:
    found = []
    for name in names * 3:  # from even and from odd meetings on
        x = torch.tensor([1.0, rank, 2.0 * rank])
        with unisono.algorithm(name):
            dist.all_reduce(x)
        found.append(x.tolist())
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_inline_calls_of_several_meetings_use_both_halves(world_size: int) -> None:
    names, total = ["columns", "star", "ring", "one_shot"], world_size * (world_size - 1) / 2
    for found in ranks(world_size).run(by_name, names):
        assert found == [[world_size, total, 2 * total]] * 3 * len(names)


class Shelf:
    """A store of one process."""

    def set(self, key: str, value: str) -> None: ...


def test_a_header_that_lies_there_already_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_FUSED", "0")
    segment, fd = create(Shelf(), 1, "alone")
    os.close(fd)
    board = Board(segment, 0)
    queue = CollectiveQueue(board, [0], "alone", GroupMonitor(board, [0], "alone"))
    copied: list[int] = []

    def copy(target: int, source: int, nbytes: int) -> None:
        copied.append(target)
        ctypes.memmove(target, source, nbytes)

    builder = Builder(queue.preparer, [0], oversubscribed=False)
    call = builder.prepare(Call("barrier"), torch.uint8, (0,))
    run = interpreter(dataclasses.replace(_PRIMITIVES, copy=copy)).run
    for number in range(1, 7):
        assert run(call.address, queue._at, number, 0, 0, 0, 0, None) == w.DONE
    first = segment.address + segment.layout.headers
    assert copied == [first, first + segment.layout.header]  # one half for even meetings, one for odd ones
    assert queue.calls == 6

"""Copies to memory that peers read go past the caches exactly while that is found to be quicker."""

import dataclasses
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from ranks import ranks
from unisono.runtime import message_words
from unisono.runtime import words as w
from unisono.runtime.past_caches import STATE_WORDS, staging_copy
from unisono.runtime.torch_ops import _PRIMITIVES
from unisono.torch_names import all_gather_single
from unisono.transport.layout import LINE, Layout
from unisono.transport.process import cores

KIB = 1 << 10


class Machine:
    """Memory in which a KiB takes some ns by way of the caches, and some past them; notes the ways that copies go."""

    def __init__(self, plain: float, past: float) -> None:
        self.plain, self.past = plain, past
        self.time, self.ways = 0.0, ""
        self.control = [0] * STATE_WORDS
        made = dataclasses.replace(_PRIMITIVES, now=lambda: int(self.time), copy=self._copy, copy_past=self._copy_past)
        self._stage = staging_copy(made, 0)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        self.time += self.plain * nbytes / KIB
        self.ways += "c"

    def _copy_past(self, target: int, source: int, nbytes: int) -> None:
        self.time += self.past * nbytes / KIB
        self.ways += "p"

    def copies(self, count: int, nbytes: int = 64 * KIB) -> str:
        """The ways of so many copies more."""
        self.ways = ""
        for _ in range(count):
            self._stage(self.control, 0, 0, nbytes)
        return self.ways


def test_copies_that_are_quick_keep_to_the_caches() -> None:
    assert Machine(plain=100, past=20).copies(1000) == "c" * 1000


def test_slow_copies_go_past_the_caches_and_now_and_then_the_other_way() -> None:
    machine = Machine(plain=350, past=20)
    assert machine.copies(4 + 128 + 1 + 128 + 1) == "c" * 4 + "p" * 128 + "c" + "p" * 128 + "c"
    machine.plain = 100  # the cores have moved together
    assert machine.copies(128 + 1000) == "p" * 128 + "c" * 1000


def test_a_copy_that_was_interrupted_changes_nothing() -> None:
    machine = Machine(plain=100, past=20)
    for _ in range(10):
        machine.plain = 10_000
        assert machine.copies(3) == "ccc"
        machine.plain = 100
        assert machine.copies(1) == "c"


def test_where_memory_itself_is_slow_copies_keep_to_the_caches() -> None:
    machine = Machine(plain=350, past=300)
    ways = machine.copies(10_000)
    assert ways.startswith("c" * 4 + "p" * 128 + "c" * 128)
    assert machine.copies(1000, nbytes=8 * KIB) == "c" * 1000  # short ones are not measured


def forced(rank: int, world_size: int, count: int) -> list[bool]:
    """Whether results are right though every copy goes past the caches."""
    group: Any = dist.distributed_c10d._get_default_group()
    for control, at in (
        (group._group.collectives._control._words, w.PAST_CACHES),
        (group._group.messages._control._words, message_words.PAST_CACHES),
    ):
        control[at] = 10_000
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (world_size, count * world_size + 1), generator=generator, dtype=torch.uint8)[:, 1:]
    mine = data[rank].clone()[: count * world_size]
    found = []
    part, whole = mine[:count].clone(), torch.empty(count * world_size, dtype=torch.uint8)
    all_gather_single(whole, part)
    found.append(torch.equal(whole, torch.cat([data[r][:count] for r in range(world_size)])))
    dist.all_to_all_single(whole, mine.contiguous())
    found.append(torch.equal(whole, torch.cat([data[r][rank * count : (rank + 1) * count] for r in range(world_size)])))
    x = data[0].clone() if rank == 0 else torch.zeros(count * world_size, dtype=torch.uint8)
    dist.broadcast(x, 0)
    found.append(torch.equal(x, data[0]))
    y = torch.empty_like(x)
    if rank == 0:
        dist.send(data[1].clone(), 1)
    elif rank == 1:
        dist.recv(y, 0)
        found.append(torch.equal(y, data[1]))
    dist.barrier()
    return found


@pytest.mark.parametrize("count", [16 * KIB, 20_011, 300_007, 3 << 20])
def test_what_goes_past_the_caches_arrives_whole(count: int) -> None:
    for found in ranks(2).run(forced, count):
        assert all(found)


def in_turn(rank: int, world_size: int, nbytes: int) -> tuple[list[float], list[int], list[int]]:
    """What broadcasts one after the other bring; where their data lies then, and where that of one more."""
    queue: Any = dist.distributed_c10d._get_default_group()._group.collectives  # type: ignore[attr-defined]
    segment, layout = queue._segment, queue._segment.layout
    count, brought = 2 * layout.stage // nbytes, []

    def broadcast(value: float) -> None:
        x = torch.full((nbytes // 4,), value if rank == 0 else 0.0)
        dist.broadcast(x, 0)
        brought.extend(x.unique().tolist())

    def places(*values: float) -> list[int]:
        staged = bytearray(segment.raw[layout.stages : layout.stages + 2 * world_size * layout.area])
        starts = torch.frombuffer(staged, dtype=torch.float32)[:: LINE // 4]
        first = dict(zip(*(x.tolist() for x in numpy.unique(starts.numpy(), return_index=True)), strict=True))
        return [LINE * first[value] for value in values if value in first]

    dist.barrier()
    for call in range(count):
        broadcast(nbytes + call + 0.5)
    dist.barrier()
    found = places(*(nbytes + call + 0.5 for call in range(count)))
    dist.barrier()
    broadcast(nbytes - 0.5)
    dist.barrier()
    return brought, found, places(nbytes - 0.5)


@pytest.mark.parametrize(("nbytes", "turns"), [(256 * KIB, True), (64 * KIB, True), (4 * KIB, False)])
def test_short_calls_use_windows_of_the_staging_memory_in_turn(nbytes: int, turns: bool) -> None:
    count = 2 * Layout(2).stage // nbytes
    for brought, found, last in ranks(2).run(in_turn, nbytes):
        assert brought == [nbytes + call + 0.5 for call in range(count)] + [nbytes - 0.5]
        if turns and cores() > 1:
            assert len(set(found)) == count  # none was overwritten
            assert last[0] in found  # but by one more call: meetings without data count too
        else:
            assert len(found) == 2  # one in each half

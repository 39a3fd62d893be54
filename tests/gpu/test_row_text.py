"""Kernels of all_to_all of rows: golden text, and values by executing it, interleaved at random."""

import os
import random
from typing import Any

import pytest
import torch

from gpu.device import Device, Number, Pointers, Space, Unstaged
from gpu.test_kernel_text import GOLDEN
from unisono.algorithms import build
from unisono.gpu.row_text import row_kernel, row_kernel_name, row_module
from unisono.program import Program, lower

TILE = 16


def programs(n: int) -> list[Program]:
    return [lower(build("direct", "all_to_all", n), rank, "put", True) for rank in range(n)]


def test_three_ranks() -> None:
    text = "\n".join(row_kernel(program) for program in programs(3))
    file = GOLDEN / "rows" / "all_to_all_rows.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def wanted(xs: list[torch.Tensor], counts: list[list[int]], capacities: list[int]) -> list[torch.Tensor]:
    """Row by row: what is not there is zeros, what does not fit is dropped."""
    n, outs = len(xs), []
    for rank in range(n):
        rows = []
        for source, x in enumerate(xs):
            first = sum(counts[source][:rank])
            sent = range(first, first + counts[source][rank])
            rows += [x[row] if row < len(x) else torch.zeros_like(xs[0][0]) for row in sent]
        rows += [torch.zeros_like(xs[0][0])] * (capacities[rank] - len(rows))
        outs.append(torch.stack(rows[: capacities[rank]]))
    return outs


class Walk:
    """A random call: tensors of all ranks, and what must come out. Counts may exceed what there is, or what fits."""

    def __init__(self, n: int, width: int, chance: random.Random, exceed: bool) -> None:
        seed = torch.Generator().manual_seed(chance.randrange(1 << 30))
        self.width = width
        self.counts = [[chance.choice((0, 0, 1, 2, 5, 9)) for _ in range(n)] for _ in range(n)]
        spare = (-3, 2) if exceed else (0, 2)
        rows = [max(1, sum(row) + chance.randint(*spare)) for row in self.counts]
        self.capacities = [max(1, sum(row[r] for row in self.counts) + chance.randint(*spare)) for r in range(n)]
        self.xs = [torch.randint(1, 99, (row, width), generator=seed, dtype=torch.int16) for row in rows]
        self.outs = [torch.full((capacity, width), 111, dtype=torch.int16) for capacity in self.capacities]
        self.received = [torch.full((n,), -1) for _ in range(n)]
        self.wanted = wanted(self.xs, self.counts, self.capacities)

    def arguments(self, device: Device, header: int) -> Any:
        def of(rank: int) -> tuple[Any, ...]:
            four = (self.xs[rank], torch.tensor(self.counts[rank]), self.outs[rank], self.received[rank])
            flat = [Pointers(Space(tensor.view(-1)), 0) for tensor in four]
            sizes = [Number(size) for size in (len(self.xs[rank]), self.capacities[rank], self.width)]
            return (
                *flat,
                Pointers("bases", 0),
                Pointers(device.counters[rank], 0),
                None,
                *sizes,
                header,
                None,
                None,
                TILE,
            )

        return of

    def wrong(self) -> int:
        n = len(self.xs)
        found = sum(not torch.equal(out, want) for out, want in zip(self.outs, self.wanted, strict=True))
        return found + sum(self.received[r].tolist() != [row[r] for row in self.counts] for r in range(n))


def play(n: int, calls: int, seed: int, waits: bool = True) -> int:
    """Random calls in a row over one workspace; the number of wrong outputs."""
    chance = random.Random(seed)
    kernels = [row_kernel(program) for program in programs(n)]
    device = Device(row_module("\n\n".join(kernels)), n, chance)
    device.waits = waits
    walks = [Walk(n, chance.choice((1, 3, 16, 24)), chance, chance.random() < 0.4) for _ in range(calls)]
    names = [row_kernel_name(program) for program in programs(n)]
    device.launch([(names, chance.randrange(1, 4), walk.arguments(device, k)) for k, walk in enumerate(walks)])
    return sum(walk.wrong() for walk in walks)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_values_in_any_order(n: int) -> None:
    assert play(n, 25, n) == 0


def test_a_wait_left_out_is_found() -> None:
    found = 0
    for seed in range(6):
        try:
            found += play(3, 4, seed, waits=False)
        except Unstaged:
            found += 1
    assert found


def test_the_reverse_is_the_transpose() -> None:
    """Whatever the counts: what the call gives of x, weighed by y, is what the reverse gives of y, weighed by x."""
    chance = random.Random(5)
    for exceed in (False, True):
        walk = Walk(3, 2, chance, exceed)
        there = [[row[r] for row in walk.counts] for r in range(3)]
        ys = [torch.randint(1, 9, out.shape) for out in walk.outs]
        back = wanted(ys, there, [len(x) for x in walk.xs])
        forth = sum(int((a * b).sum()) for a, b in zip(walk.wanted, ys, strict=True))
        assert forth == sum(int((a * b).sum()) for a, b in zip(walk.xs, back, strict=True))

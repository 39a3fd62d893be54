"""Collectives on real numbers: what every rank gives, and, from all ranks' inputs alone, what it must end up with.

Values are small integers, so that any order of summation gives the same; `exact=False` draws floats for tests that
compare bits.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from unisono.algorithms import build, list_algorithms
from unisono.schedule import Schedule

Tensors = list[torch.Tensor]
Runner = Callable[["Case", Schedule, Tensors, Tensors], None]

SUMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
FACTOR = 2.0
REDUCING = ("all_reduce", "reduce", "reduce_scatter")


@dataclass(frozen=True)
class Case:
    """One run: an algorithm, its numbers, and `numel`: elements per block, plus a few by block if `uneven`."""

    algorithm: str
    collective: str
    world_size: int
    root: int = 0
    chunks: int = 1
    numel: int = 12
    dtype: torch.dtype = torch.float32
    op: str = "SUM"
    deterministic: bool = False
    uneven: bool = False
    exact: bool = True

    @property
    def schedule(self) -> Schedule:
        return build(self.algorithm, self.collective, self.world_size, self.root, self.chunks)

    @functools.cached_property
    def sizes(self) -> list[int]:
        n = self.world_size
        blocks = {"all_to_all": n * n, "all_reduce": 1, "broadcast": 1, "reduce": 1, "barrier": 1}
        return [self.numel + (5 * b % 3 if self.uneven else 0) for b in range(blocks.get(self.collective, n))]


def values(case: Case, rank: int, block: int) -> torch.Tensor:
    """What a rank contributes to a block, whatever the algorithm."""
    return drawn(case.sizes[block], case.dtype, case.exact, 1000 * rank + block)


@functools.lru_cache(maxsize=4096)
def drawn(numel: int, dtype: torch.dtype, exact: bool, seed: int) -> torch.Tensor:
    """Small whole numbers, or with ``exact`` false normal ones."""
    generator = torch.Generator().manual_seed(seed)
    if not exact:
        return torch.randn(numel, generator=generator).to(dtype)
    low = 0 if dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool) else -2
    return torch.randint(low, 4, (numel,), generator=generator).to(dtype)


def summed(case: Case, block: int) -> torch.Tensor:
    """All contributions to a block, in float64 or int64, then once to the dtype."""
    return total(case.sizes[block], case.dtype, case.exact, case.op, case.world_size, block)


@functools.lru_cache(maxsize=1024)
def total(numel: int, dtype: torch.dtype, exact: bool, op: str, world_size: int, block: int) -> torch.Tensor:
    """The sum, or what else ``op`` makes of them, of all ranks' values."""
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    wide = torch.complex128 if dtype.is_complex else wide
    if dtype == torch.bool:
        wide = torch.bool
    parts = [drawn(numel, dtype, exact, 1000 * rank + block).to(wide) for rank in range(world_size)]
    if op == "PREMUL_SUM":
        parts = [part * FACTOR for part in parts]
    result = functools.reduce(SUMS[op], parts)
    return (result / world_size if op == "AVG" else result).to(dtype)


def given(case: Case, rank: int) -> Tensors:
    """The blocks that a rank hands in."""
    n, everything = case.world_size, range(len(case.sizes))
    if case.collective in ("broadcast", "scatter") and rank != case.root:
        return []
    if case.collective in ("all_gather", "gather"):
        everything = range(rank, rank + 1)
    if case.collective == "all_to_all":
        everything = range(rank * n, rank * n + n)
    return [values(case, rank, block).clone() for block in everything]


def expected(case: Case, rank: int) -> Tensors:
    """The blocks that a rank must have in the end."""
    n, blocks = case.world_size, range(len(case.sizes))
    match case.collective:
        case "all_reduce":
            return [summed(case, 0)]
        case "reduce":
            return [summed(case, 0)] if rank == case.root else []
        case "reduce_scatter":
            return [summed(case, rank)]
        case "broadcast":
            return [values(case, case.root, 0)]
        case "scatter":
            return [values(case, case.root, rank)]
        case "all_gather":
            return [values(case, block, block) for block in blocks]
        case "gather":
            return [values(case, block, block) for block in blocks] if rank == case.root else []
        case "all_to_all":
            return [values(case, source, source * n + rank) for source in range(n)]
    return []


def joined(tensors: Tensors) -> torch.Tensor | None:
    """The blocks in one tensor, None for none."""
    return torch.cat(tensors) if tensors else None


def problems(case: Case, rank: int, run: Runner) -> list[str]:
    """What is wrong after a run: results that differ, inputs that were touched."""
    sources, wanted = given(case, rank), expected(case, rank)
    kept = [source.clone() for source in sources]
    results = [torch.empty_like(w) for w in wanted]
    for result in results:
        result.view(torch.uint8).fill_(1)
    run(case, case.schedule, sources, results)
    wrong = [f"{case}: input {i} changed" for i, k in enumerate(kept) if not same(k, sources[i])]
    for i, (result, want) in enumerate(zip(results, wanted, strict=True)):
        if not same(result, want):
            wrong.append(f"{case}: rank {rank} result {i} is {result.tolist()}, expected {want.tolist()}")
    return wrong


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def every_case(world_size: int, variants: Sequence[dict[str, object]]) -> Iterator[Case]:
    """Every algorithm that can run, for every collective it has, with one of the variants of `Case` fields in turn.

    Roots and chunks alternate as well.
    """
    for i, entry in enumerate(e for e in list_algorithms() if not e.simulation_only):
        root = (i % world_size) if entry.rooted else 0
        base = Case(entry.name, entry.collective, world_size, root, 1 + i % 2)
        yield replace(base, **variants[(i + world_size) % len(variants)])

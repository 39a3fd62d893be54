"""Known inputs and what must come of them: tables of small whole numbers, a different one for each rank; of complex
numbers with equal parts, but for products; of bools whether a number is odd.

Element i of rank r's input is ``table_r[i % PERIOD]``; the period is a prime, so that a piece that lands in a wrong
place does not look like the right one. Sums and products over ranks are exact in every dtype that has the digits.
"""

from collections.abc import Iterator

import torch

__all__ = ["FACTOR", "PERIOD", "Tables", "fill", "wrong"]

PERIOD = 65521
FACTOR = 2.0
"""That of premul_sum."""
_SEED = 20_000
_REDUCE = {
    "sum": lambda a, b: a + b,
    "avg": lambda a, b: a + b,
    "premul_sum": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


class Tables:
    """The inputs of all ranks and their reduction, ``PERIOD`` elements each, repeated once so that slices never wrap.

    ``inputs[r]`` and ``reduced`` have ``dtype`` and lie on ``device``. The reduction is worked out in int64 on the CPU
    and cast, independently of any backend; an average is divided in float64, that of whole numbers once the sum has
    wrapped.
    """

    def __init__(self, world_size: int, dtype: torch.dtype, op: str, device: str = "cpu") -> None:
        most = 2 if op == "product" else 7
        whole = [_table(rank, most) for rank in range(world_size)]
        if dtype is torch.bool:
            whole = [table % 2 for table in whole]
        total = whole[0].clone()
        for table in whole[1:]:
            total = _REDUCE[op](total, table)
        if op == "product" and dtype.is_floating_point:
            total = total.clamp(max=1 << 62)
        whole_sum = total if dtype.is_floating_point or dtype.is_complex else total.to(dtype)
        exact = {"avg": whole_sum.double() / world_size, "premul_sum": total * FACTOR}.get(op, total)
        unit = 1 + 1j if dtype.is_complex and op != "product" else 1
        self.inputs = [_twice(table * unit).to(dtype).to(device) for table in whole]
        self.reduced = _twice(exact * unit).to(dtype).to(device)


def _table(rank: int, most: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED + rank)
    return torch.randint(1, most + 1, (PERIOD,), generator=generator)


def _twice(table: torch.Tensor) -> torch.Tensor:
    return torch.cat((table, table))


def _pieces(table: torch.Tensor, first: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Elements ``first`` to ``first + count`` of an endless repetition, as (offset, piece) of a period each."""
    start = first % PERIOD
    for offset in range(0, count, PERIOD):
        yield offset, table[start : start + min(PERIOD, count - offset)]


def fill(target: torch.Tensor, table: torch.Tensor, first: int = 0) -> None:
    """Write the table's endless repetition from element ``first`` on into ``target`` (1-D, contiguous)."""
    for offset, piece in _pieces(table, first, target.numel()):
        target[offset : offset + piece.numel()] = piece


def wrong(found: torch.Tensor, table: torch.Tensor, first: int = 0) -> int:
    """The number of elements of ``found`` (1-D) that differ from the table's repetition from ``first`` on.

    Whole numbers must be equal; floating point may be off by the rounding of its dtype, 8 units in the last place, but
    float8, which has few, must be rounded once from the exact result.
    """
    count = 0
    for offset, piece in _pieces(table, first, found.numel()):
        got, want = _comparable(found[offset : offset + piece.numel()]), _comparable(piece)
        if torch.equal(got, want):
            continue
        differs = got != want
        if piece.is_floating_point() or piece.is_complex():
            slack = 8 * torch.finfo(piece.dtype).eps * (piece.itemsize > 1)
            wide = torch.complex128 if piece.is_complex() else torch.float64
            differs &= ~((got.to(wide) - want.to(wide)).abs() <= slack * want.to(wide).abs())
        count += int(differs.sum())
    return count


_ALIKE = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _comparable(piece: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that torch compares."""
    if piece.dtype in _ALIKE:
        return piece.view(_ALIKE[piece.dtype])
    return piece.float() if piece.is_floating_point() and piece.itemsize == 1 else piece

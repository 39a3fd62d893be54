"""Reductions: one fixed order of summation, the right width for every dtype, and refusals with their reason.

All ranks' parts are combined in rank order, ``((p0 + p1) + p2) + ...``, one tensor operation per part. The order is the
same whatever the size, chunking or algorithm, so all ranks hold the same bits, run after run. bfloat16, float16 and
float8 accumulate in float32 (complex32 in complex64) and are rounded once. Unsigned integers that torch cannot add are
added as signed ones: the bits are the same. NaN propagates in MIN and MAX. AVG of integers is NCCL's: the sum, wrapped
to the dtype as SUM's, divided and cut towards zero.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from unisono.errors import UsageError
from unisono.runtime.call import name_of_dtype

__all__ = ["Reducer", "op_and_factor", "reducer"]

_Binary = Callable[..., torch.Tensor]
_COMBINE: dict[str, _Binary] = {
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
_OP_NAMES = {getattr(dist.ReduceOp.RedOpType, name): name for name in _COMBINE}
_OP_CODES = {int(op): name for op, name in _OP_NAMES.items()}  # torch hashes a ReduceOp to its code
_WIDE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
    torch.complex32: torch.complex64,
}
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_PLAIN = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
)  # fmt: skip
_NUMBERS = frozenset((*_PLAIN, *_WIDE, *_SIGNED))


class Reducer:
    """Combines one part per rank into a result, for one dtype and one reduce op (see the module's text)."""

    def __init__(self, dtype: torch.dtype, op: str, factor: float = 1.0) -> None:
        self.dtype, self.op, self.factor = dtype, op, factor
        self._combine = _COMBINE[op]
        self.wide = _WIDE.get(dtype)
        self._signed = _SIGNED.get(dtype)
        self._floating = dtype.is_floating_point or dtype.is_complex
        self._plain = self.wide is None and self._signed is None and op not in ("AVG", "PREMUL_SUM")

    def __call__(self, parts: Sequence[torch.Tensor], out: torch.Tensor, complete: int = 0) -> None:
        """Writes the combination of ``parts`` (flat, equal sizes, in that order) to ``out``, which may be one of them.

        Any of them may hold accumulators, of dtype `wide`. ``complete``: the world size, if the contributions of all
        ranks are in the sum, by which AVG divides; else 0.
        """
        if self._plain and len(parts) == 2:
            self._combine(parts[0], parts[1], out=out)
        elif self._signed is not None:
            self._as_signed(parts, out, complete)
        else:
            self._in_order(parts, out, complete)

    def prepared(self, mine: torch.Tensor) -> torch.Tensor:
        """This rank's input as it goes into the sum: multiplied by the factor for PREMUL_SUM, else itself."""
        if self.op != "PREMUL_SUM":
            return mine
        return mine.to(self.wide).mul_(self.factor).to(self.dtype) if self.wide else mine * self.factor

    def _in_order(self, parts: Sequence[torch.Tensor], out: torch.Tensor, complete: int) -> None:
        combine = self._combine
        if len(parts) == 1:
            total = parts[0].to(self.wide) if self.wide else parts[0].clone()
        elif self.wide:
            total = combine(parts[0].to(self.wide), parts[1].to(self.wide))
        else:
            total = combine(parts[0], parts[1])
        for part in parts[2:]:
            combine(total, part.to(self.wide) if self.wide else part, out=total)
        if self.op == "AVG" and complete:
            total = total.div_(complete) if self._floating else _quotient(total, complete)
        out.copy_(total)

    def _as_signed(self, parts: Sequence[torch.Tensor], out: torch.Tensor, complete: int) -> None:
        """Two's complement sums, products and bits are the same for both; for MIN and MAX the order is turned first."""
        signed = self._signed
        assert signed is not None
        views = [part.view(signed) for part in parts]
        turn = torch.iinfo(signed).min if self.op in ("MIN", "MAX") else 0
        total = views[0] ^ turn
        for view in views[1:]:
            self._combine(total, view ^ turn if turn else view, out=total)
        if self.op == "AVG" and complete:
            out.copy_(_unsigned_quotient(total.view(self.dtype), complete))
        else:
            out.view(signed).copy_(total ^ turn if turn else total)


def _quotient(total: torch.Tensor, size: int) -> torch.Tensor:
    """Integers divided by ``size``, which their dtype need not hold, and cut towards zero; int64."""
    return torch.div(total.to(torch.int64), size, rounding_mode="trunc")


def _unsigned_quotient(total: torch.Tensor, size: int) -> torch.Tensor:
    """As `_quotient` for unsigned integers, of which int64 has the bits: first half of each is divided."""
    bits = total.to(torch.int64)
    found = _quotient(bits >> 1 & torch.iinfo(torch.int64).max, size) << 1
    return found + (bits - found * size >= size)


@lru_cache(maxsize=512)
def reducer(dtype: torch.dtype, op: str, factor: float = 1.0) -> Reducer:
    """The reducer for a dtype and a reduce op; raises `UsageError` where the op means nothing for the dtype."""
    name = name_of_dtype(dtype)
    floating = dtype.is_floating_point or dtype.is_complex
    if op not in _COMBINE:
        raise UsageError(f"reduce op {op or 'UNUSED'} is not one of {', '.join(_COMBINE)}")
    if dtype not in _NUMBERS:
        raise UsageError(f"{op} is not defined for {name}: its elements can only be moved; give .view(torch.uint8)")
    if op == "AVG" and dtype == torch.bool:
        raise UsageError("AVG is not defined for bool: truth values have no mean; convert to a dtype of numbers")
    if op == "PREMUL_SUM" and not floating:
        raise UsageError(
            f"PREMUL_SUM is not defined for {name}: the factor is a float, and so must be what it scales; use SUM and "
            "multiply, or convert to a floating point dtype"
        )
    if op in ("MIN", "MAX") and dtype.is_complex:
        raise UsageError(f"{op} is not defined for {name}: complex numbers have no order")
    if op in ("BAND", "BOR", "BXOR") and floating:
        raise UsageError(f"{op} is not defined for {name}: it combines the bits of integers and booleans")
    return Reducer(dtype, op, factor)


def op_and_factor(op: Any, factor: float = 1.0) -> tuple[str, float]:
    """The name of torch's reduce op, "UNUSED" if it has none here, and its factor: PREMUL_SUM's, else 1.

    A name stays, with ``factor``.
    """
    if isinstance(op, str):
        return op, factor
    name = _OP_CODES.get(hash(op)) or _OP_NAMES.get(getattr(op, "op", op), "UNUSED")
    return name, float(op.__getstate__()[1]) if name == "PREMUL_SUM" else 1.0

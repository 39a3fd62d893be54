"""Sums in compiled loops: parts of all ranks combined in rank order, for every dtype that the loops reduce.

The bits are those of run/reduce.py: bfloat16 and float16 are accumulated in float32 and rounded once. A dtype is told
by a ``sample``, an array of it; uint16 stands for bfloat16, int16 for float16. Needs numba.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import overload
from numba.np.numpy_support import carray

from unisono.run import fused_words as words
from unisono.transport.atomics import inner, intrinsic, pointer, types
from unisono.transport.native import copy

__all__ = ["places", "sum_up"]

_SHORT = (types.uint16, types.int16)


@intrinsic
def _float_of(context: Any, bits: Any) -> Any:
    """32 bits as the float32 that they are."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), build


@intrinsic
def _bits_of(context: Any, value: Any) -> Any:
    """A float32 as its 32 bits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), build


@inner
def _widened(half: int) -> Any:
    """The float32 that 16 bits are as float16."""
    sign, bits = np.uint32(half & 0x8000) << np.uint32(16), np.uint32(half & 0x7FFF)
    small = _bits_of(np.float32(bits) * np.float32(2.0**-24))  # also zero
    other = (bits << np.uint32(13)) + np.uint32(0x70000000 if bits >= 0x7C00 else 0x38000000)
    return _float_of(np.uint32(sign | (small if bits < 0x400 else other)))


@inner
def _narrowed(value: float) -> Any:
    """A float32 as the 16 bits of a float16, rounded to nearest, ties to even."""
    whole = _bits_of(value)
    bits = np.uint32(whole & 0x7FFFFFFF)
    small = np.uint32(_bits_of(_float_of(bits) + np.float32(0.5)) - np.uint32(0x3F000000))
    other = np.uint32(bits + np.uint32(0xC8000FFF) + ((bits >> np.uint32(13)) & np.uint32(1))) >> np.uint32(13)
    large = np.uint32(0x7E00 if bits > 0x7F800000 else 0x7C00)
    found = small if bits < 0x38800000 else (other if bits < 0x47800000 else large)
    return np.uint16(found | ((whole >> np.uint32(16)) & np.uint32(0x8000)))


def _load(acc: Any, part: Any) -> None:
    """Sets ``acc`` to ``part``, widened if it is of 16 bits."""


@overload(_load, strict=False)
def _load_typed(acc: Any, part: Any) -> Any:
    if part.dtype == types.uint16:

        def shift(acc: Any, part: Any) -> None:
            bits = acc.view(np.uint32)
            for i in range(part.size):
                bits[i] = np.uint32(part[i]) << np.uint32(16)

        return shift
    if part.dtype == types.int16:

        def widen(acc: Any, part: Any) -> None:
            for i in range(part.size):
                acc[i] = _widened(part[i])

        return widen

    def plain(acc: Any, part: Any) -> None:
        for i in range(part.size):
            acc[i] = part[i]

    return plain


def _store(part: Any, acc: Any) -> None:
    """Sets ``part`` to ``acc``; 16 bits are rounded to nearest, ties to even."""


@overload(_store, strict=False)
def _store_typed(part: Any, acc: Any) -> Any:
    if part.dtype == types.uint16:

        def cut(part: Any, acc: Any) -> None:
            bits = acc.view(np.uint32)
            for i in range(part.size):
                b = bits[i]
                odd = (b >> np.uint32(16)) & np.uint32(1)
                rounded = (b + np.uint32(0x7FFF) + odd) >> np.uint32(16)
                nan = (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
                part[i] = np.uint16(0x7FC0) if nan else np.uint16(rounded)

        return cut
    if part.dtype == types.int16:

        def narrow(part: Any, acc: Any) -> None:
            for i in range(part.size):
                part[i] = _narrowed(acc[i])

        return narrow

    def plain(part: Any, acc: Any) -> None:
        for i in range(part.size):
            part[i] = acc[i]

    return plain


@inner
def _combine(acc: Any, part: Any, op: int) -> None:
    """``acc`` op ``part`` into ``acc``: 0 SUM, 1 PRODUCT, 2 MIN, 3 MAX (NaN wins), 4 BAND, 5 BOR, 6 BXOR of bytes."""
    n = part.size
    if op == 0:
        for i in range(n):
            acc[i] += part[i]
    elif op == 1:
        for i in range(n):
            acc[i] *= part[i]
    elif op == 2:
        for i in range(n):
            a, b = acc[i], part[i]
            acc[i] = a if (a < b or a != a) else b
    elif op == 3:
        for i in range(n):
            a, b = acc[i], part[i]
            acc[i] = a if (a > b or a != a) else b
    else:
        _combine_bits(acc, part, op)


def _combine_bits(acc: Any, part: Any, op: int) -> None:
    """The ops on bits, which any integers share: they come as bytes."""


@overload(_combine_bits, strict=False)
def _combine_bits_typed(acc: Any, part: Any, op: Any) -> Any:
    if acc.dtype != types.uint8:
        return lambda acc, part, op: None

    def combine(acc: Any, part: Any, op: Any) -> None:
        if op == 4:
            for i in range(part.size):
                acc[i] &= part[i]
        elif op == 5:
            for i in range(part.size):
                acc[i] |= part[i]
        else:
            for i in range(part.size):
                acc[i] ^= part[i]

    return combine


def _divide(acc: Any, n: int, size: int) -> None:
    """Divides the first ``n`` of ``acc`` by ``size``; integers have no AVG."""


@overload(_divide, strict=False)
def _divide_typed(acc: Any, n: Any, size: Any) -> Any:
    if isinstance(acc.dtype, types.Integer):
        return lambda acc, n, size: None

    def divide(acc: Any, n: Any, size: Any) -> None:
        by = acc.dtype.type(size)
        for i in range(n):
            acc[i] /= by

    return divide


def _scratch(desk: Any, sample: Any) -> Any:
    """Room for `BLOCK` partial sums of the dtype of ``sample``."""


@overload(_scratch, strict=False)
def _scratch_typed(desk: Any, sample: Any) -> Any:
    if sample.dtype in _SHORT:
        return lambda desk, sample: carray(pointer(desk[words.SCRATCH]), words.BLOCK, np.float32)
    return lambda desk, sample: carray(pointer(desk[words.SCRATCH]), words.BLOCK, sample.dtype)


def _wide(desk: Any, part: Any) -> Any:
    """``part`` as it is summed: 16 bits widened into the second half of the scratch."""


@overload(_wide, strict=False)
def _wide_typed(desk: Any, part: Any) -> Any:
    if part.dtype not in _SHORT:
        return lambda desk, part: part

    def widened(desk: Any, part: Any) -> Any:
        wide = carray(pointer(desk[words.SCRATCH] + 4 * words.BLOCK), part.size, np.float32)
        _load(wide, part)
        return wide

    return widened


@inner
def places(desk: Any) -> Any:
    """Room for an address per rank: where the parts lie that `sum_up` combines."""
    return carray(pointer(desk[words.SCRATCH] + 8 * words.BLOCK), desk[words.SIZE], np.int64)


@inner
def sum_up(desk: Any, parts: Any, target: int, nbytes: int, sample: Any, op: int, boxed: bool) -> None:
    """Combines ``nbytes`` at each of the addresses ``parts``, one per rank, into ``target``, in rank order.

    ``op`` + 8 divides by the world size; ``boxed``: the result takes the place of every peer's part as well.
    """
    size, rank, item, acc = desk[words.SIZE], desk[words.RANK], sample.itemsize, _scratch(desk, sample)
    for start in range(0, nbytes, words.BLOCK * item):
        length = min(words.BLOCK * item, nbytes - start)
        n = length // item
        for peer in range(size):
            part = carray(pointer(parts[peer] + start), n, dtype=sample.dtype)
            if peer == 0:
                _load(acc, part)
            else:
                _combine(acc, _wide(desk, part), op & 7)
        if op & 8:
            _divide(acc, n, size)
        result = carray(pointer(target + start), n, dtype=sample.dtype)
        _store(result, acc)
        if boxed:
            for peer in range(size):
                if peer != rank:
                    copy(parts[peer] + start, target + start, length)

"""The primitives of compiled loops: sums of every dtype that they reduce, and copies. See `Primitives`. Needs numba.

The bits are those of runtime/reduce.py: bfloat16 and float16 are accumulated in float32 and rounded once. A dtype is
given by a ``sample``, an array of it; uint16 stands for bfloat16, int16 for float16.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import overload
from numba.np.numpy_support import carray

from unisono.runtime.interpreter import Primitives
from unisono.runtime.words import BLOCK
from unisono.transport.atomics import (
    fetch_add,
    inner,
    intrinsic,
    load_acquire32,
    load_acquire64,
    pointer,
    relax,
    store_release32,
    store_release64,
    types,
)
from unisono.transport.native import copy, copy_past, now, pause, sleep, store, wake

__all__ = ["COMPILED"]

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


@intrinsic
def _quotient(context: Any, value: Any, by: Any) -> Any:
    """64 bits divided by others, cut towards zero."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sdiv(*args)

    return types.int64(types.int64, types.int64), build


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
    """Divides the first ``n`` of ``acc`` by ``size``; integers are cut towards zero."""


@overload(_divide, strict=False)
def _divide_typed(acc: Any, n: Any, size: Any) -> Any:
    if isinstance(acc.dtype, types.Integer):

        def cut(acc: Any, n: Any, size: Any) -> None:
            for i in range(n):
                acc[i] = _quotient(np.int64(acc[i]), size)

        return cut

    def divide(acc: Any, n: Any, size: Any) -> None:
        by = acc.dtype.type(size)
        for i in range(n):
            acc[i] /= by

    return divide


def _accumulators(scratch: int, sample: Any) -> Any:
    """Room for `BLOCK` partial sums of the dtype of ``sample``."""


@overload(_accumulators, strict=False)
def _accumulators_typed(scratch: Any, sample: Any) -> Any:
    if sample.dtype in _SHORT:
        return lambda scratch, sample: carray(pointer(scratch), BLOCK, np.float32)
    return lambda scratch, sample: carray(pointer(scratch), BLOCK, sample.dtype)


def _begin(acc: Any, one: int, other: int, wide: bool, n: int, both: bool, sample: Any) -> Any:
    """Sets ``acc`` to the part at ``one``, or, for ``both``, to its sum with that at ``other``; returns how many parts
    that were.
    """


@overload(_begin, strict=False)
def _begin_typed(acc: Any, one: Any, other: Any, wide: Any, n: Any, both: Any, sample: Any) -> Any:
    if sample.dtype in _SHORT:

        def widened(acc: Any, one: int, other: int, wide: bool, n: int, both: bool, sample: Any) -> int:
            if wide:
                _load(acc, carray(pointer(one), n, np.float32))
            else:
                _load(acc, carray(pointer(one), n, sample.dtype))
            return 1

        return widened

    def plain(acc: Any, one: int, other: int, wide: bool, n: int, both: bool, sample: Any) -> int:
        first = carray(pointer(one), n, sample.dtype)
        if both:
            second = carray(pointer(other), n, sample.dtype)
            for i in range(n):
                acc[i] = first[i] + second[i]
            return 2
        _load(acc, first)
        return 1

    return plain


def _add(acc: Any, scratch: int, part: int, wide: bool, n: int, op: int, sample: Any) -> None:
    """Combines the part at an address into ``acc``; 16 bits are widened in the second half of the scratch."""


@overload(_add, strict=False)
def _add_typed(acc: Any, scratch: Any, part: Any, wide: Any, n: Any, op: Any, sample: Any) -> Any:
    if sample.dtype not in _SHORT:
        return lambda acc, scratch, part, wide, n, op, sample: _combine(acc, carray(pointer(part), n, sample.dtype), op)

    def widened(acc: Any, scratch: int, part: int, wide: bool, n: int, op: int, sample: Any) -> None:
        if wide:
            _combine(acc, carray(pointer(part), n, np.float32), op)
        else:
            more = carray(pointer(scratch + 4 * BLOCK), n, np.float32)
            _load(more, carray(pointer(part), n, sample.dtype))
            _combine(acc, more, op)

    return widened


def _finish(acc: Any, scratch: int, n: int, sample: Any) -> Any:
    """The address of ``acc`` in the user's dtype."""


@overload(_finish, strict=False)
def _finish_typed(acc: Any, scratch: Any, n: Any, sample: Any) -> Any:
    if sample.dtype not in _SHORT:
        return lambda acc, scratch, n, sample: scratch

    def rounded(acc: Any, scratch: int, n: int, sample: Any) -> int:
        _store(carray(pointer(scratch + 8 * BLOCK), n, sample.dtype), acc)
        return scratch + 8 * BLOCK

    return rounded


@inner
def _sum(
    scratch: int, places: Any, parts: int, targets: int, nbytes: int, op: int, size: int, sample: Any
) -> None:  # fmt: skip
    """`Primitives.combine`: block by block, into the scratch, so that the partial sums stay in the first cache."""
    item, count = sample.itemsize, parts + targets
    acc = _accumulators(scratch, sample)
    for start in range(0, nbytes, BLOCK * item):
        length = min(BLOCK * item, nbytes - start)
        n, wide_start = length // item, start // item * acc.itemsize
        both = parts > 1 and op & 7 == 0
        wide = places[count] != 0
        one = places[0] + (wide_start if wide else start)
        j = _begin(acc, one, places[1] + start, wide, n, both, sample)
        while j < parts:
            wide = places[count + j] != 0
            _add(acc, scratch, places[j] + (wide_start if wide else start), wide, n, op & 7, sample)
            j += 1
        if op & 8 and size > 0:
            _divide(acc, n, size)
        result = 0
        for j in range(parts, count):
            if places[count + j]:
                copy(places[j] + wide_start, scratch, n * acc.itemsize)
            else:
                if result == 0:
                    result = _finish(acc, scratch, n, sample)
                copy(places[j] + start, result, length)


def _converted(target: int, source: int, nbytes: int, sample: Any, widens: bool) -> None:
    """Elements of 16 bits into accumulators, or back; other dtypes have accumulators of their own kind."""


@overload(_converted, strict=False)
def _converted_typed(target: Any, source: Any, nbytes: Any, sample: Any, widens: Any) -> Any:
    if sample.dtype not in _SHORT:
        return lambda target, source, nbytes, sample, widens: copy(target, source, nbytes)

    def convert(target: int, source: int, nbytes: int, sample: Any, widens: bool) -> None:
        n = nbytes // 2
        if widens:
            _load(carray(pointer(target), n, np.float32), carray(pointer(source), n, sample.dtype))
        else:
            _store(carray(pointer(target), n, sample.dtype), carray(pointer(source), n, np.float32))

    return convert


@inner
def _widen(target: int, source: int, nbytes: int, sample: Any) -> None:
    _converted(target, source, nbytes, sample, True)


@inner
def _narrow(target: int, source: int, nbytes: int, sample: Any) -> None:
    _converted(target, source, nbytes, sample, False)


@inner
def _words(address: int, count: int) -> Any:
    return carray(pointer(address), count, np.int64)


@inner
def _arrive(address: int, full: int) -> None:
    if fetch_add(address, 1) == full - 1:
        wake(address)


@inner
def _ring(address: int) -> None:
    fetch_add(address, 1)
    wake(address)


@inner
def _equal(one: int, other: int, nbytes: int) -> bool:
    """Of whole words."""
    mine, theirs = _words(one, nbytes // 8), _words(other, nbytes // 8)
    differences = 0
    for i in range(nbytes // 8):
        differences |= mine[i] ^ theirs[i]
    return differences == 0


COMPILED = Primitives(
    inner=inner,
    words=_words,
    arrive=_arrive,
    load_acquire32=load_acquire32,
    load_acquire64=load_acquire64,
    relax=relax,
    store_release32=store_release32,
    store_release64=store_release64,
    store=store,
    now=now,
    pause=pause,
    sleep=sleep,
    ring=_ring,
    equal=_equal,
    copy=copy,
    copy_past=copy_past,
    widen=_widen,
    narrow=_narrow,
    combine=_sum,
)

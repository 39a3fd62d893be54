"""The compiled loop that copies, sums, or does both in one pass (weights/rows.py has its rows, weights/checksum.py the
definition of the sums). Needs numba; kept like other loops.
"""

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.np.numpy_support import carray

from unisono.transport.atomics import inner, intrinsic, pointer, types
from unisono.transport.native import copy

__all__ = ["checksum_loops"]


_alloca: Any = cgutils.alloca_once
_function: Any = cgutils.get_or_insert_function
_for_range: Any = cgutils.for_range


def _mixed(number: Any) -> Any:
    """An odd 64-bit number for a number: the finaliser of splitmix64."""
    z = np.uint64(number) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def _pairs(address: int, weights_at: int, count: int) -> Any:
    """The weighted sum of `count` pairs of words; a weight holds those of both."""
    units, weights = carray(pointer(address), count, np.uint64), carray(pointer(weights_at), count, np.uint64)
    low, high, total = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(0)
    for i in range(count):
        two, both = units[i], weights[i]
        total += (two & low) * (both & low) + (two >> high) * (both >> high)
    return total


def _pairs_copied(source: int, target: int, weights_at: int, count: int) -> Any:
    """The same of pairs that it copies: the CPU multiplies while it waits for memory."""
    units, out = carray(pointer(source), count, np.uint64), carray(pointer(target), count, np.uint64)
    weights = carray(pointer(weights_at), count, np.uint64)
    low, high, total = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(0)
    for i in range(count):
        two, both = units[i], weights[i]
        out[i] = two
        total += (two & low) * (both & low) + (two >> high) * (both >> high)
    return total


_PAIR = ir.IntType(64)


def _past_caches(builder: Any, value: Any, address: Any, nbytes: int) -> None:
    """Stores a value at a multiple of its size, past the caches: the line need not be read, nor be had for that."""
    store = builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=nbytes)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


@intrinsic
def _store_past(context: Any, address: Any, value: Any) -> Any:
    """Stores a word of 32 bits past the caches."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _past_caches(builder, args[1], args[0], 4)
        return context.get_dummy_value()

    return types.none(types.intp, types.uint32), build


@intrinsic
def _settle(context: Any) -> Any:
    """What was stored past the caches is seen by others before what is stored from here on."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() == "x86_64":
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(_function(builder.module, kind, "llvm.x86.sse.sfence"), [])
        return context.get_dummy_value()

    return types.none(), build


def _units(width: int, summing: bool) -> Any:
    """`units(source, target, weights, count)`: copies ``width`` pairs past the caches, so often, and sums them, if so.

    The target is aligned to as many bytes.
    """
    kind: Any = ir.VectorType(_PAIR, width)
    low, high = (ir.Constant(kind, [word] * width) for word in (0xFFFFFFFF, 32))

    @intrinsic
    def units(context: Any, source: Any, target: Any, weights: Any, count: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            total = _alloca(builder, kind)
            builder.store(ir.Constant(kind, [0] * width), total)

            def load(start: Any, offset: Any) -> Any:
                return builder.load(builder.inttoptr(builder.add(start, offset), kind.as_pointer()), align=1)

            with _for_range(builder, args[3], intp=_PAIR) as loop:
                offset = builder.mul(loop.index, ir.Constant(_PAIR, 8 * width))
                unit = load(args[0], offset)
                _past_caches(builder, unit, builder.add(args[1], offset), 8 * width)
                if summing:
                    both = load(args[2], offset)
                    first = builder.mul(builder.and_(unit, low), builder.and_(both, low))
                    second = builder.mul(builder.lshr(unit, high), builder.lshr(both, high))
                    builder.store(builder.add(builder.load(total), builder.add(first, second)), total)
            reduce = ir.FunctionType(_PAIR, [kind])
            found = _function(builder.module, reduce, f"llvm.vector.reduce.add.v{width}i64")
            return builder.call(found, [builder.load(total)])

        return types.uint64(types.intp, types.intp, types.intp, types.intp), build

    return units


def _streamed(summing: bool) -> Callable[..., Any]:
    """`streamed(source, target, weights_at, count)`: words copied past the caches, the target aligned to them."""
    pairs, quads, lines = _units(1, summing), _units(2, summing), _units(8, summing)

    def one_word(source: int, target: int, weights_at: int) -> Any:
        word = carray(pointer(source), 1, np.uint32)[0]
        _store_past(target, word)
        return np.uint64(word) * np.uint64(carray(pointer(weights_at), 1, np.uint32)[0]) if summing else np.uint64(0)

    word = inner(one_word)

    def streamed(source: int, target: int, weights_at: int, count: int) -> Any:
        total, end, weights = np.uint64(0), target + 4 * count, weights_at - target
        ahead = source - target
        if target & 4 and target < end:
            total += word(target + ahead, target, target + weights)
            target += 4
        if target & 8 and target + 8 <= end:
            total += pairs(target + ahead, target, target + weights, 1)
            target += 8
        head = min((-target & 63) >> 4, (end - target) >> 4)
        total += quads(target + ahead, target, target + weights, head)
        target += 16 * head
        whole = (end - target) >> 6
        total += lines(target + ahead, target, target + weights, whole)
        target += 64 * whole
        tail = (end - target) >> 4
        total += quads(target + ahead, target, target + weights, tail)
        target += 16 * tail
        if end - target >= 8:
            total += pairs(target + ahead, target, target + weights, 1)
            target += 8
        if target < end:
            total += word(target + ahead, target, target + weights)
        return total

    return inner(streamed)


def _edge(address: int, weights_at: int, first: int, count: int) -> Any:
    """The weighted sum of `count` bytes, of which the first is the `first`-th of its 4096."""
    units, weights = carray(pointer(address), count, np.uint8), carray(pointer(weights_at), 1024, np.uint32)
    total, i = np.uint64(0), 0
    while i < count:
        at = first + i
        if at & 3 or count - i < 4:
            total += (np.uint64(units[i]) << np.uint64(8 * (at & 3))) * np.uint64(weights[at >> 2])
            i += 1
        else:
            total += np.uint64(carray(pointer(address + i), 1, np.uint32)[0]) * np.uint64(weights[at >> 2])
            i += 4
    return total


def _sum_of() -> Callable[..., Any]:
    """`sum_of(source, target, first, count, weights, past)`: of bytes that follow each other here and in the whole.

    They are copied on the way, unless target is -1.
    """
    mixed, pairs, copied, edge = inner(_mixed), inner(_pairs), inner(_pairs_copied), inner(_edge)
    streamed = _streamed(summing=True)

    def sum_of(source: int, target: int, first: int, count: int, weights: int, past: int) -> Any:
        total = np.uint64(0)
        while count > 0:
            start = first & 4095
            length = min(4096 - start, count)
            head = min(-start & 3, length)
            streams = past and (target + head) & 3 == 0
            whole = (length - head) & (-4 if streams else -8)
            tail = length - head - whole
            part = edge(source, weights, start, head) if head else np.uint64(0)
            if tail:
                part += edge(source + length - tail, weights, start + length - tail, tail)
            if target == -1:
                part += pairs(source + head, weights + start + head, whole >> 3)
            else:
                copy(target, source, head)
                if streams:
                    part += streamed(source + head, target + head, weights + start + head, whole >> 2)
                else:
                    part += copied(source + head, target + head, weights + start + head, whole >> 3)
                copy(target + length - tail, source + length - tail, tail)
                target += length
            total += part * mixed(first >> 12)
            source += length
            first += length
            count -= length
        return total

    return inner(sum_of)


def _copied_past() -> Callable[..., Any]:
    """`copied_past(source, target, nbytes)`: copies past the caches, but for what is not aligned."""
    streamed = _streamed(summing=False)

    def copied_past(source: int, target: int, nbytes: int) -> None:
        head = min(-target & 3, nbytes)
        whole = (nbytes - head) & -4
        copy(target, source, head)
        streamed(source + head, target + head, 0, whole >> 2)
        copy(target + head + whole, source + head + whole, nbytes - head - whole)

    return inner(copied_past)


def checksum_loops() -> dict[str, Callable[..., int]]:
    """`moves(table, rows, source, target, weights, sums, past)`: addresses of the rows, and those that a row's count from.

    target: -1 to sum alone, where the source is. weights: of the 1024 32-bit weights, 0 to copy alone. sums: a row's
    sum is added to the 64-bit word that the row names. past: 1 to store past the caches.
    """
    sum_of, copied_past = _sum_of(), _copied_past()

    def moves(table: int, rows: int, source: int, target: int, weights: int, sums: int, past: int) -> Any:
        """See above."""
        rows_of = carray(pointer(table), (rows, 21), np.int64)
        for i in range(rows):
            r, total = rows_of[i], np.uint64(0)
            for a in range(r[5]):
                for b in range(r[9]):
                    for c in range(r[13]):
                        for d in range(r[17]):
                            here = source + r[0] + a * r[6] + b * r[10] + c * r[14] + d * r[18]
                            there = target + r[1] + a * r[7] + b * r[11] + c * r[15] + d * r[19]
                            first = r[3] + a * r[8] + b * r[12] + c * r[16] + d * r[20]
                            if target == -1:
                                total += sum_of(here, -1, first, r[2], weights, 0)
                            elif weights:
                                total += sum_of(here, there, first, r[2], weights, past)
                            elif past:
                                copied_past(here, there, r[2])
                            else:
                                copy(there, here, r[2])
            if weights:
                carray(pointer(sums + r[4]), 1, np.uint64)[0] += total
        if past:
            _settle()
        return 0

    return {"moves": moves}

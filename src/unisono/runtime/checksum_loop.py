"""The compiled loop that copies, sums, or does both in one pass (weights/rows.py has its rows, weights/checksum.py the
definition of the sums), and one that prefetches (weights/prefetch.py). Needs numba; kept like other loops.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.np.numpy_support import carray

from unisono.transport.atomics import inner, intrinsic, pointer, settle, types
from unisono.transport.native import copy

__all__ = ["checksum_loops"]


_alloca: Any = cgutils.alloca_once
_function: Any = cgutils.get_or_insert_function
_for_range: Any = cgutils.for_range
_I64: Any = ir.IntType(64)


def _mixed(number: Any) -> Any:
    """An odd 64-bit number for a number: the finaliser of splitmix64."""
    z = np.uint64(number) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def _words(count: int, summing: bool, storing: str) -> Any:
    """`words(source, target, weights, times)`: ``count`` words of 32 bits, so many times; returns their weighted sum.

    storing: "": they are not copied. "kept": copied by way of the caches. "past": past these, so that a line is neither
    read before it is written nor taken from another core that has read it; the target is aligned to ``count`` words.
    """
    kind: Any = ir.VectorType(ir.IntType(32), count)
    wide: Any = ir.VectorType(_I64, count)
    whole: Any = kind if count > 2 else ir.IntType(32 * count)

    @intrinsic
    def words(context: Any, source: Any, target: Any, weights: Any, times: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            total = _alloca(builder, wide)
            builder.store(ir.Constant(wide, [0] * count), total)
            with _for_range(builder, args[3], intp=_I64) as loop:
                offset = builder.mul(loop.index, ir.Constant(_I64, 4 * count))
                here, there, weight = (
                    builder.inttoptr(builder.add(start, offset), pointed.as_pointer())
                    for start, pointed in zip(args[:3], (kind, whole, kind), strict=True)
                )
                unit = builder.load(here, align=1)
                if storing:
                    align = 4 * count if storing == "past" else 1
                    store = builder.store(builder.bitcast(unit, whole), there, align=align)
                    if storing == "past":
                        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
                        store.set_metadata("nontemporal", one)
                if summing:
                    product = builder.mul(builder.zext(unit, wide), builder.zext(builder.load(weight, align=1), wide))
                    builder.store(builder.add(builder.load(total), product), total)
            reduce = _function(builder.module, ir.FunctionType(_I64, [wide]), f"llvm.vector.reduce.add.v{count}i64")
            return builder.call(reduce, [builder.load(total)])

        return types.uint64(types.intp, types.intp, types.intp, types.intp), build

    return words


def _run(summing: bool, storing: str) -> Callable[..., Any]:
    """`run(source, target, weights_at, count)`: words that follow each other; see `_words`. Past: aligned to words."""
    one, two, four, sixteen = (_words(count, summing, storing) for count in (1, 2, 4, 16))
    past = storing == "past"

    def run(source: int, target: int, weights_at: int, count: int) -> Any:
        total, end, there, weights = np.uint64(0), source + 4 * count, target - source, weights_at - source
        if past and target & 4 and source < end:
            total += one(source, source + there, source + weights, 1)
            source += 4
        if past and (source + there) & 8 and source + 8 <= end:
            total += two(source, source + there, source + weights, 1)
            source += 8
        if past:
            times = min((-(source + there) & 63) >> 4, (end - source) >> 4)
            total += four(source, source + there, source + weights, times)
            source += 16 * times
        times = (end - source) >> 6
        total += sixteen(source, source + there, source + weights, times)
        source += 64 * times
        times = (end - source) >> 4
        total += four(source, source + there, source + weights, times)
        source += 16 * times
        if end - source >= 8:
            total += two(source, source + there, source + weights, 1)
            source += 8
        if source < end:
            total += one(source, source + there, source + weights, 1)
        return total

    return inner(run)


def _edge(address: int, weights_at: int, first: int, count: int) -> Any:
    """The weighted sum of `count` bytes of one word, of which the first is the `first`-th of its 4096."""
    units, weights = carray(pointer(address), count, np.uint8), carray(pointer(weights_at), 1024, np.uint32)
    total = np.uint64(0)
    for i in range(count):
        total += np.uint64(units[i]) << np.uint64(8 * ((first + i) & 3))
    return total * np.uint64(weights[first >> 2])


def _sum_of() -> Callable[..., Any]:
    """`sum_of(source, target, first, count, weights, past)`: of bytes that follow each other here and in the whole.

    They are copied on the way, unless target is -1.
    """
    mixed, edge = inner(_mixed), inner(_edge)
    summed, kept, past_caches = _run(True, ""), _run(True, "kept"), _run(True, "past")

    def sum_of(source: int, target: int, first: int, count: int, weights: int, past: int) -> Any:
        total = np.uint64(0)
        while count > 0:
            start = first & 4095
            length = min(4096 - start, count)
            head = min(-start & 3, length)
            whole = (length - head) >> 2
            tail = length - head - 4 * whole
            part = edge(source, weights, start, head) if head else np.uint64(0)
            if tail:
                part += edge(source + length - tail, weights, start + length - tail, tail)
            if target == -1:
                part += summed(source + head, 0, weights + start + head, whole)
            else:
                copy(target, source, head)
                if past and (target + head) & 3 == 0:
                    part += past_caches(source + head, target + head, weights + start + head, whole)
                else:
                    part += kept(source + head, target + head, weights + start + head, whole)
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
    past_caches = _run(False, "past")

    def copied_past(source: int, target: int, nbytes: int) -> None:
        head = min(-target & 3, nbytes)
        whole = (nbytes - head) & -4
        copy(target, source, head)
        past_caches(source + head, target + head, 0, whole >> 2)
        copy(target + head + whole, source + head + whole, nbytes - head - whole)

    return inner(copied_past)


@intrinsic
def _prefetch(context: Any, address: Any) -> Any:
    """Asks for a line that is about to be read; no access, whatever is there."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [place], kind)
        read, near, data = number(0), number(3), number(1)
        builder.call(function, [builder.inttoptr(args[0], place), read, near, data])
        return context.get_dummy_value()

    return types.none(types.intp), build


def prefetch(addresses: int, count: int, lines: int) -> Any:
    """Prefetches so many lines of 64 bytes from each of so many addresses on."""
    starts = carray(pointer(addresses), count, np.int64)
    for i in range(count):
        for line in range(lines):
            _prefetch(starts[i] + 64 * line)
    return 0


def checksum_loops() -> dict[str, Callable[..., int]]:
    """`moves(table, rows, source, target, weights, sums, past)`: the table of rows, and where its addresses count from.

    target: -1 to sum alone, where the source is. weights: of the 1024 32-bit weights, 0 to copy alone. sums: a row's
    sum is added to the 64-bit word that the row names. past: 1 to store past the caches. `prefetch`: see there.
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
            settle()
        return 0

    return {"moves": moves, "prefetch": prefetch}

"""The compiled loop that copies, sums, or does both in one pass (weights/rows.py has its rows, weights/checksum.py the
definition of the sums). Needs numba; kept like other loops.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from unisono.transport.atomics import inner, pointer
from unisono.transport.native import copy

__all__ = ["checksum_loops"]


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
    """`sum_of(source, target, first, count, weights)`: of bytes that follow each other in memory and in the whole.

    They are copied on the way, unless target is -1.
    """
    mixed, pairs, copied, edge = inner(_mixed), inner(_pairs), inner(_pairs_copied), inner(_edge)

    def sum_of(source: int, target: int, first: int, count: int, weights: int) -> Any:
        total = np.uint64(0)
        while count > 0:
            start = first & 4095
            length = min(4096 - start, count)
            head = min(-start & 7, length)
            whole = (length - head) >> 3
            tail = length - head - 8 * whole
            part = edge(source, weights, start, head) if head else np.uint64(0)
            if tail:
                part += edge(source + length - tail, weights, start + length - tail, tail)
            if target == -1:
                part += pairs(source + head, weights + start + head, whole)
            else:
                copy(target, source, head)
                part += copied(source + head, target + head, weights + start + head, whole)
                copy(target + length - tail, source + length - tail, tail)
                target += length
            total += part * mixed(first >> 12)
            source += length
            first += length
            count -= length
        return total

    return inner(sum_of)


def checksum_loops() -> dict[str, Callable[..., int]]:
    """`moves(table, rows, source, target, weights, sums)`: addresses of the rows, and those that a row's count from.

    target: -1 to sum alone, where the source is. weights: of the 1024 32-bit weights, 0 to copy alone. sums: a row's
    sum is added to the 64-bit word that the row names.
    """
    sum_of = _sum_of()

    def moves(table: int, rows: int, source: int, target: int, weights: int, sums: int) -> Any:
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
                                total += sum_of(here, -1, first, r[2], weights)
                            elif weights:
                                total += sum_of(here, there, first, r[2], weights)
                            else:
                                copy(there, here, r[2])
            if weights:
                carray(pointer(sums + r[4]), 1, np.uint64)[0] += total
        return 0

    return {"moves": moves}

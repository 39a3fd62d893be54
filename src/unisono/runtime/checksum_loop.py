"""The compiled loop of checksums (weights/checksum.py has their definition). Needs numba; kept like other loops."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from unisono.transport.atomics import inner, pointer

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


def _edge(address: int, weights_at: int, first: int, count: int) -> Any:
    """The weighted sum of `count` bytes, of which the first is the `first`-th of its 4096."""
    units, weights = carray(pointer(address), count, np.uint8), carray(pointer(weights_at), 1024, np.uint32)
    total = np.uint64(0)
    for i in range(count):
        at = first + i
        total += (np.uint64(units[i]) << np.uint64(8 * (at & 3))) * np.uint64(weights[at >> 2])
    return total


def checksum_loops() -> dict[str, Callable[..., int]]:
    """`sums(table, rows, weights, out)`: addresses of the rows, the 1024 32-bit weights, and a 64-bit word per row.

    A row is 11 words: address, bytes per run, first byte in the whole, then for four outer dims, the outermost first,
    how many there are and how many bytes of the whole they are apart.
    """
    mixed, pairs, edge = inner(_mixed), inner(_pairs), inner(_edge)

    def run(address: int, first: int, count: int, weights: int) -> Any:
        total = np.uint64(0)
        while count > 0:
            start = first & 4095
            length = min(4096 - start, count)
            head = min(-start & 7, length)
            whole = (length - head) >> 3
            tail = length - head - 8 * whole
            part = edge(address, weights, start, head) if head else np.uint64(0)
            part += pairs(address + head, weights + start + head, whole)
            if tail:
                part += edge(address + length - tail, weights, start + length - tail, tail)
            total += part * mixed(first >> 12)
            address += length
            first += length
            count -= length
        return total

    of_run = inner(run)

    def sums(table: int, rows: int, weights: int, out: int) -> Any:
        """See above."""
        rows_of = carray(pointer(table), (rows, 11), np.int64)
        out_of = carray(pointer(out), rows, np.uint64)
        for i in range(rows):
            row = rows_of[i]
            address, total = row[0], np.uint64(0)
            for a in range(row[3]):
                for b in range(row[5]):
                    for c in range(row[7]):
                        for d in range(row[9]):
                            first = row[2] + a * row[4] + b * row[6] + c * row[8] + d * row[10]
                            total += of_run(address, first, row[1], weights)
                            address += row[1]
            out_of[i] = total
        return 0

    return {"sums": sums}

"""Calls that go from shared tensor to shared tensor, for compiled loops: offers, verdicts (run/offers.py), and what the
programs of run/direct.py do. Needs numba.
"""

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from unisono.run import direct
from unisono.run import fused_words as words
from unisono.run.fused_steps import piece_at
from unisono.run.fused_sums import places, sum_up
from unisono.run.offers import AGAIN, DIRECT, PUSHED, STAGED
from unisono.transport.atomics import inner, pointer
from unisono.transport.native import copy

__all__ = ["UNREADY", "abandoned", "go", "lay", "verdict"]

UNREADY = 4
"""Added to a verdict of `STAGED` or `AGAIN` that this rank could better: there are arenas for it to map."""

_PIECE = 256 * 1024

_share = inner(direct.share)


@inner
def _offer(desk: Any, meeting: int, rank: int) -> Any:
    """The two words of a rank's offer at a meeting."""
    return carray(pointer(desk[words.OFFERS] + 64 * ((meeting & 1) * desk[words.SIZE] + rank)), 2, np.int64)


@inner
def _ready(desk: Any, root: int) -> bool:
    """Whether the arenas that this rank needs are mapped: the root's, or everybody's (root -1, or this rank)."""
    rank = desk[words.RANK]
    bases = carray(pointer(desk[words.BASES]), desk[words.SIZE], np.int64)
    for peer in range(desk[words.SIZE]):
        needed = peer != rank and (root < 0 or root in (rank, peer))
        if needed and bases[peer] == 0:
            return False
    return True


@inner
def _extent(desk: Any, order: Any, target: int, source: int) -> Any:
    """Address and bytes of the memory that peers read on this rank; no address where it does not lie together, or where
    results are written to it before peers have read it.
    """
    size, nbytes, kind, listed = desk[words.SIZE], order[words.NBYTES], order[words.KIND], order[words.LISTED]
    if kind != words.ALL_TO_ALL and kind != words.REDUCE_SCATTER:
        return source, nbytes
    first = piece_at(source, 0, nbytes, listed & words.INPUTS)
    for peer in range(size):
        piece = piece_at(source, peer, nbytes, listed & words.INPUTS)
        overwritten = kind == words.ALL_TO_ALL and piece == piece_at(target, peer, nbytes, listed & words.OUTPUTS)
        if piece != first + peer * nbytes or overwritten:
            return 0, 0
    return first, nbytes * size


@inner
def lay(desk: Any, order: Any, meeting: int, target: int, source: int) -> bool:
    """Lays the offer of a call for its first meeting; whether this rank hopes."""
    root, bounds = order[words.ROOT], carray(pointer(desk[words.BOUNDS]), 2, np.int64)
    address, nbytes = _extent(desk, order, target, source)
    inside = address > 0 and bounds[0] <= address and address + nbytes <= bounds[1]
    ready = _ready(desk, root)
    hopes = order[words.HOPES] == 1 and inside and (ready if root < 0 else root == desk[words.RANK])
    offer = _offer(desk, meeting, desk[words.RANK])
    offer[0] = (meeting + 1) * 4 + (2 if hopes else 0) + (1 if ready else 0)
    offer[1] = address - bounds[0] + 1 if inside else 0
    return hopes


@inner
def verdict(desk: Any, order: Any, meeting: int) -> int:
    """What follows from the offers at ``meeting``: see run/offers.py, and `UNREADY`."""
    root, rank = order[words.ROOT], desk[words.RANK]
    hoped = False
    placed = able = complete = True  # those who are read; those who read; everybody's tensor
    for peer in range(desk[words.SIZE]):
        offer = _offer(desk, meeting, peer)
        there = offer[0] >> 2 == meeting + 1
        hoped = hoped or (there and offer[0] & 2 != 0)
        shared = there and offer[1] > 0
        complete = complete and shared
        if root < 0 or root == peer:
            placed = placed and shared
        if peer != root:
            able = able and there and offer[0] & 1 != 0
    if placed and able:
        order[words.HOPES] = 1
        return PUSHED if root >= 0 and complete and _offer(desk, meeting, root)[0] & 1 != 0 else DIRECT
    order[words.HOPES] = 0
    lacking = placed and (root != rank or complete) and not _ready(desk, root)
    return (AGAIN if hoped else STAGED) + (UNREADY if lacking else 0)


@inner
def abandoned(desk: Any, number: int) -> bool:
    """Whether a peer has given up call no. ``number``, which has come to its last meeting."""
    for peer in range(desk[words.SIZE]):
        if carray(pointer(desk[words.ABANDONED] + desk[words.RECORD] * peer), 1, np.int64)[0] == number:
            return True
    return False


@inner
def _combine(desk: Any, order: Any, k: int, parts: Any, target: int, sample: Any) -> None:
    """This rank's share of chunk k of an all_reduce, or chunk k of its piece of a reduce_scatter."""
    size, rank, width, nbytes = desk[words.SIZE], desk[words.RANK], order[words.EACH], order[words.NBYTES]
    if order[words.KIND] == words.ALL_REDUCE:
        start = k * width * size
        stop = min(start + width * size, nbytes)
        share = _share(stop - start, size)
        begin = at = start + rank * share
        length = min(share, stop - begin)
    else:
        at = k * width
        begin, length = rank * nbytes + at, min(width, nbytes - at)
    if length > 0:
        for peer in range(size):
            parts[peer] += begin
        sum_up(desk, parts, target + at, length, sample, order[words.OP], order[words.KIND] == words.ALL_REDUCE)


@inner
def _copy(target: int, source: int, nbytes: int) -> None:
    """Copies in pieces, so that lines that a peer's core has written are stored to through the caches."""
    for start in range(0, nbytes, _PIECE):
        copy(target + start, source + start, min(_PIECE, nbytes - start))


@inner
def _collect(desk: Any, order: Any, k: int, parts: Any, target: int) -> None:
    """Chunk k of every peer's piece of an all_gather or all_to_all; with the first, all of this rank's own."""
    size, rank, nbytes, at = desk[words.SIZE], desk[words.RANK], order[words.NBYTES], k * order[words.EACH]
    first = rank * nbytes if order[words.KIND] == words.ALL_TO_ALL else 0
    for i in range(size):
        peer = (rank + i) % size
        here, there = piece_at(target, peer, nbytes, order[words.LISTED] & words.OUTPUTS), parts[peer] + first
        if peer != rank:
            _copy(here + at, there + at, min(order[words.EACH], nbytes - at))
        elif k == 0 and here != there:
            copy(here, there, nbytes)


@inner
def _broadcast(desk: Any, order: Any, k: int, mode: int, parts: Any) -> None:
    """Chunk k of a broadcast: the root's data to this rank, or, at the root, its share of the work."""
    size, rank, root, nbytes = desk[words.SIZE], desk[words.RANK], order[words.ROOT], order[words.NBYTES]
    start = k * order[words.EACH] * size
    stop = min(start + order[words.EACH] * size, nbytes)
    middle = stop
    if mode == PUSHED:
        middle -= _share(stop - start, size)
    if rank != root:
        _copy(parts[rank] + start, parts[root] + start, middle - start)
    elif mode == PUSHED:
        for peer in range(size):
            if peer != root:
                _copy(parts[peer] + middle, parts[root] + middle, stop - middle)


@inner
def go(desk: Any, order: Any, k: int, mode: int, meeting: int, target: int, source: int, sample: Any) -> None:
    """Step k of a direct call whose first meeting was ``meeting``: chunk k - 1, between meetings k - 1 and k."""
    kind, rank = order[words.KIND], desk[words.RANK]
    if k == 0 or k > order[words.ROUNDS]:
        return
    parts, bases = places(desk), carray(pointer(desk[words.BASES]), desk[words.SIZE], np.int64)
    for peer in range(desk[words.SIZE]):
        parts[peer] = bases[peer] + _offer(desk, meeting, peer)[1] - 1
    parts[rank], _ = _extent(desk, order, target, source)
    if kind == words.BROADCAST:
        _broadcast(desk, order, k - 1, mode, parts)
    elif kind < words.ONE_SHOT:
        _collect(desk, order, k - 1, parts, target)
    else:
        _combine(desk, order, k - 1, parts, target, sample)

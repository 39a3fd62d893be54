"""The steps of every kind of collective, for compiled loops; what they are is told in fused.py. Needs numba; the loops
are compiled with these inside, and cached: whoever changes something here changes them too.
"""

from typing import Any

from numba import njit

from unisono.run import fused_words as words
from unisono.run.fused_sums import places, sum_up
from unisono.transport.native import copy

__all__ = ["area", "carry"]

_inner = njit(nogil=True)


@_inner
def area(desk: Any, half: int, rank: int) -> Any:
    """The address of a rank's staging area."""
    return desk[words.STAGES] + (half * desk[words.SIZE] + rank) * desk[words.STAGE]


@_inner
def _two_phase(desk: Any, k: int, half: int, target: int, source: int, nbytes: int, share: int) -> None:
    """Chunk k - 2 is copied out and chunk k staged, but for this rank's share."""
    rank, width = desk[words.RANK], share * desk[words.SIZE]
    mine, old, new = area(desk, half, rank), (k - 2) * width, k * width
    for begin, end in ((0, share * rank), (share * (rank + 1), width)):
        if k >= 2:
            copy(target + old + begin, mine + begin, min(end, nbytes - old) - begin)
        copy(mine + begin, source + new + begin, min(end, nbytes - new) - begin)


@_inner
def _stage_pieces(desk: Any, k: int, half: int, source: int, nbytes: int, width: int) -> None:
    """The peers' pieces of round k are staged."""
    for peer in range(desk[words.SIZE]):
        if peer != desk[words.RANK]:
            place = area(desk, half, desk[words.RANK]) + peer * width
            copy(place, source + peer * nbytes + k * width, min(width, nbytes - k * width))


@_inner
def _collect_pieces(desk: Any, k: int, half: int, target: int, nbytes: int, width: int, at: int) -> None:
    """The peers' pieces of round k are copied out; ``at``: where they lie in the peers' areas."""
    for peer in range(desk[words.SIZE]):
        if k >= 0 and peer != desk[words.RANK]:
            here = target + peer * nbytes + k * width
            copy(here, area(desk, half, peer) + at, min(width, nbytes - k * width))


@_inner
def _move(desk: Any, order: Any, k: int, half: int, target: int, source: int) -> None:
    """Step k of a collective that only moves."""
    kind, nbytes, rank, stage = order[words.KIND], order[words.NBYTES], desk[words.RANK], desk[words.STAGE]
    if kind == words.ALL_GATHER:
        _collect_pieces(desk, k - 1, 1 - half, target, nbytes, stage, 0)
        copy(area(desk, half, rank), source + k * stage, min(stage, nbytes - k * stage))
        if k == 0 and target + rank * nbytes != source:
            copy(target + rank * nbytes, source, nbytes)
    elif kind == words.ALL_TO_ALL:
        width = stage // desk[words.SIZE] // 64 * 64
        _collect_pieces(desk, k - 1, 1 - half, target, nbytes, width, rank * width)
        _stage_pieces(desk, k, half, source, nbytes, width)
        if k == 0 and target != source:
            copy(target + rank * nbytes, source + rank * nbytes, nbytes)
    elif kind == words.BROADCAST:
        root = order[words.OP]
        if rank == root:
            copy(area(desk, half, root), target + k * stage, min(stage, nbytes - k * stage))
        elif k >= 1:
            old = (k - 1) * stage
            copy(target + old, area(desk, 1 - half, root), min(stage, nbytes - old))


@_inner
def carry(desk: Any, order: Any, k: int, half: int, target: int, source: int, sample: Any) -> None:
    """Step k of any collective, its next meeting having the parity ``half``; see `step` in fused.py."""
    kind, nbytes, rank = order[words.KIND], order[words.NBYTES], desk[words.RANK]
    share = desk[words.STAGE] // sample.itemsize // desk[words.SIZE] // 64 * 64 * sample.itemsize
    at = own = here = length = 0
    if kind < words.ONE_SHOT:
        _move(desk, order, k, half, target, source)
    elif kind == words.ONE_SHOT:
        if k == 0:
            copy(area(desk, half, rank), source, nbytes)
        length = nbytes
    elif kind == words.ALL_REDUCE:
        _two_phase(desk, k, half, target, source, nbytes, share)
        at = share * rank
        own = here = (k - 1) * share * desk[words.SIZE] + at
        length = min(share, nbytes - here)
    else:
        _stage_pieces(desk, k, half, source, nbytes, share)
        at, here = share * rank, (k - 1) * share
        own, length = rank * nbytes + here, min(share, nbytes - here)
    if k >= 1 and length > 0:
        parts = places(desk)
        for peer in range(desk[words.SIZE]):
            parts[peer] = area(desk, 1 - half, peer) + at
        parts[rank] = source + own
        sum_up(desk, parts, target + here, length, sample, order[words.OP], kind == words.ALL_REDUCE)

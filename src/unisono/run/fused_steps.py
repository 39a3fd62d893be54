"""The steps of every kind of collective, for compiled loops; what they are is told in fused.py. Needs numba."""

from typing import Any

from unisono.run import fused_words as words
from unisono.run.fused_sums import places, sum_up
from unisono.transport.atomics import inner, read
from unisono.transport.native import copy

__all__ = ["area", "carry", "piece_at"]


@inner
def area(desk: Any, half: int, rank: int) -> Any:
    """The address of a rank's staging area."""
    return desk[words.STAGES] + (half * desk[words.SIZE] + rank) * desk[words.STAGE]


@inner
def piece_at(base: int, rank: int, nbytes: int, listed: int) -> Any:
    """Where a rank's piece lies: the ranks' are side by side from ``base`` on, or ``listed`` there."""
    return read(base + 8 * rank) if listed else base + rank * nbytes


@inner
def _two_phase(desk: Any, order: Any, k: int, half: int, target: int, source: int) -> None:
    """Chunk k - 2 is copied out and chunk k staged, but for this rank's share."""
    rank, share, nbytes, root = desk[words.RANK], order[words.WIDTH], order[words.NBYTES], order[words.ROOT]
    width = share * desk[words.SIZE]
    mine, old, new = area(desk, half, rank), (k - 2) * width, k * width
    for begin, end in ((0, share * rank), (share * (rank + 1), width)):
        if k >= 2 and (root < 0 or root == rank):
            copy(target + old + begin, mine + begin, min(end, nbytes - old) - begin)
        copy(mine + begin, source + new + begin, min(end, nbytes - new) - begin)


@inner
def _stage_pieces(desk: Any, order: Any, k: int, half: int, source: int) -> None:
    """The peers' pieces of round k are staged."""
    width, nbytes, listed = order[words.WIDTH], order[words.NBYTES], order[words.LISTED] & words.INPUTS
    for peer in range(desk[words.SIZE]):
        if peer != desk[words.RANK]:
            place = area(desk, half, desk[words.RANK]) + peer * width
            copy(place, piece_at(source, peer, nbytes, listed) + k * width, min(width, nbytes - k * width))


@inner
def _collect_pieces(desk: Any, order: Any, k: int, half: int, target: int, at: int) -> None:
    """The peers' pieces of round k are copied out; ``at``: where they lie in the peers' areas."""
    width, nbytes, listed = order[words.WIDTH], order[words.NBYTES], order[words.LISTED] & words.OUTPUTS
    for peer in range(desk[words.SIZE]):
        if k >= 0 and peer != desk[words.RANK]:
            here = piece_at(target, peer, nbytes, listed) + k * width
            copy(here, area(desk, half, peer) + at, min(width, nbytes - k * width))


@inner
def _keep(order: Any, k: int, target: int, source: int) -> None:
    """Of what a rank has for itself, the piece of round k, which has just been staged or lies beside what was."""
    width, nbytes = order[words.WIDTH], order[words.NBYTES]
    if target != source:
        copy(target + k * width, source + k * width, min(width, nbytes - k * width))


@inner
def _move(desk: Any, order: Any, k: int, half: int, target: int, source: int) -> None:
    """Step k of a collective that only moves."""
    kind, nbytes, rank, root = order[words.KIND], order[words.NBYTES], desk[words.RANK], order[words.ROOT]
    width, listed = order[words.WIDTH], order[words.LISTED]
    mine, new, old = area(desk, half, rank), k * width, (k - 1) * width
    if kind == words.ALL_GATHER:
        _collect_pieces(desk, order, k - 1, 1 - half, target, 0)
        copy(mine, source + new, min(width, nbytes - new))
        _keep(order, k, piece_at(target, rank, nbytes, listed & words.OUTPUTS), source)
    elif kind == words.ALL_TO_ALL:
        _collect_pieces(desk, order, k - 1, 1 - half, target, rank * width)
        _stage_pieces(desk, order, k, half, source)
        own = piece_at(source, rank, nbytes, listed & words.INPUTS)
        _keep(order, k, piece_at(target, rank, nbytes, listed & words.OUTPUTS), own)
    elif kind == words.BROADCAST and rank == root:
        copy(mine, target + new, min(width, nbytes - new))
    elif kind == words.GATHER and rank == root:
        _collect_pieces(desk, order, k - 1, 1 - half, target, 0)
        _keep(order, k, piece_at(target, rank, nbytes, listed & words.OUTPUTS), source)
    elif kind == words.GATHER:
        copy(mine, source + new, min(width, nbytes - new))
    elif kind == words.SCATTER and rank == root:
        _stage_pieces(desk, order, k, half, source)
        _keep(order, k, target, piece_at(source, rank, nbytes, listed & words.INPUTS))
    elif k >= 1 and kind != words.BARRIER:  # what the root has staged
        at = rank * width if kind == words.SCATTER else 0
        copy(target + old, area(desk, 1 - half, root) + at, min(width, nbytes - old))


@inner
def carry(desk: Any, order: Any, k: int, half: int, target: int, source: int, sample: Any) -> None:
    """Step k of any collective, its next meeting having the parity ``half``; see `step` in fused.py."""
    kind, nbytes, rank, root = order[words.KIND], order[words.NBYTES], desk[words.RANK], order[words.ROOT]
    share, elsewhere = order[words.WIDTH], root >= 0 and root != rank
    at = own = here = length = 0
    if kind < words.ONE_SHOT:
        _move(desk, order, k, half, target, source)
    elif kind == words.ONE_SHOT:
        if k == 0:
            copy(area(desk, half, rank), source, nbytes)
        length = 0 if elsewhere else nbytes
    elif kind == words.REDUCE_SCATTER:
        _stage_pieces(desk, order, k, half, source)
        at, here = share * rank, (k - 1) * share
        own = piece_at(source, rank, nbytes, order[words.LISTED] & words.INPUTS) + here - source
        length = min(share, nbytes - here)
    else:
        _two_phase(desk, order, k, half, target, source)
        at = share * rank
        own = here = (k - 1) * share * desk[words.SIZE] + at
        length = min(share, nbytes - here)
    if k >= 1 and length > 0:
        parts = places(desk)
        for peer in range(desk[words.SIZE]):
            parts[peer] = area(desk, 1 - half, peer) + at
        result = target + here
        if kind == words.REDUCE and elsewhere:
            result = parts[root]
        parts[rank] = source + own
        sum_up(desk, parts, result, length, sample, order[words.OP], kind == words.ALL_REDUCE)

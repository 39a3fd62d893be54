"""Whole collectives as compiled loops: stage, meet, compare headers, reduce and collect in one call, without the
interpreter. Needs numba (`unisono[fast]`); imported only where it is installed.

What is written where, and how often the ranks meet, is what the programs do (run/programs.py): a rank may come this
way while its peers take the other. Every kind of collective is cut into the same steps: step k collects what meeting
k - 1 brought, then stages what meeting k shall; the last only collects. `step` carries one out, for calls whose
meetings the lane waits for; `run` carries all out and meets in between, and returns early where a peer keeps it
waiting for ``patience`` ns: nobody looks for lost peers in here.

Sums have the bits of run/reduce.py: in rank order, bfloat16 accumulated in float32 and rounded once.

A meeting is an atomic add (transport/atomics.py). Sleepers are woken by the last to arrive: its add comes before its
FUTEX_WAKE, and FUTEX_WAIT compares the word again under the kernel's lock.
"""

from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload
from numba.np.numpy_support import carray

from unisono.transport.atomics import clear, count_up, look, pointer, tell, types
from unisono.transport.native import copy, note, now, pause, wake

__all__ = [
    "ALL_GATHER", "ALL_REDUCE", "ALL_TO_ALL", "BARRIER", "BLOCK", "BROADCAST", "DESK", "DIFFERS", "DONE", "ONE_SHOT",
    "ORDER", "REDUCE_SCATTER", "WAITS", "array_of", "run", "step", "types",
]  # fmt: skip

BARRIER, BROADCAST, ALL_GATHER, ALL_TO_ALL, ONE_SHOT, ALL_REDUCE, REDUCE_SCATTER = range(7)
"""Kinds of collectives: those that move, then those that reduce; ONE_SHOT and ALL_REDUCE are the two of all_reduce."""
DONE, WAITS, DIFFERS = range(3)
"""How `run` ends: all done; at a meeting that not all have come to; headers of the ranks differ. Plus 4 × step."""
DESK = (
    "rank", "size", "counters", "headers", "header", "stages", "stage", "begun", "issued", "completed", "completed_at",
    "header_at", "issued_at", "issued_kept", "moments", "ends", "kept", "base", "scratch", "crowded",
)  # fmt: skip
"""The words of a desk (int64), in order: who works there and where things lie. Addresses, but for ``rank``, ``size``,
the bytes of a ``header`` and a ``stage``, and how many moments the rank's record and its flight record keep."""
RANK, SIZE, COUNTERS, HEADERS, HEADER, STAGES, STAGE, BEGUN, ISSUED, COMPLETED, COMPLETED_AT = range(11)
HEADER_AT, ISSUED_AT, ISSUED_KEPT, MOMENTS, ENDS, KEPT, BASE, SCRATCH, CROWDED = range(11, 20)
ORDER = ("kind", "meetings", "nbytes", "op")
"""The words of an order (int64): a kind of call, prepared; see `step`."""
KIND, MEETINGS, NBYTES, OP = range(4)

_SPINS = 100
BLOCK = 2048  # elements summed at a time, so that the partial sums stay in the first cache

_inner, _entry = njit(nogil=True), njit(nogil=True, cache=True)


def array_of(dtype: Any) -> Any:
    """The type of a ``sample`` of a dtype."""
    return types.Array(getattr(types, str(dtype)), 1, "C")


def _load(acc: Any, part: Any) -> None:
    """Sets ``acc`` to ``part``; uint16 is bfloat16, widened."""


@overload(_load, strict=False)
def _load_typed(acc: Any, part: Any) -> Any:
    if part.dtype == types.uint16:

        def widen(acc: Any, part: Any) -> None:
            bits = acc.view(np.uint32)
            for i in range(part.size):
                bits[i] = np.uint32(part[i]) << np.uint32(16)

        return widen

    def plain(acc: Any, part: Any) -> None:
        for i in range(part.size):
            acc[i] = part[i]

    return plain


def _store(part: Any, acc: Any) -> None:
    """Sets ``part`` to ``acc``; to bfloat16 (uint16) rounded to nearest, ties to even."""


@overload(_store, strict=False)
def _store_typed(part: Any, acc: Any) -> Any:
    if part.dtype == types.uint16:

        def narrow(part: Any, acc: Any) -> None:
            bits = acc.view(np.uint32)
            for i in range(part.size):
                b = bits[i]
                odd = (b >> np.uint32(16)) & np.uint32(1)
                rounded = (b + np.uint32(0x7FFF) + odd) >> np.uint32(16)
                nan = (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
                part[i] = np.uint16(0x7FC0) if nan else np.uint16(rounded)

        return narrow

    def plain(part: Any, acc: Any) -> None:
        for i in range(part.size):
            part[i] = acc[i]

    return plain


@_inner
def _combine(acc: Any, part: Any, op: int) -> None:
    """``acc`` op ``part`` into ``acc``: 0 SUM and AVG, 1 PRODUCT, 2 MIN, 3 MAX (NaN wins)."""
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
    else:
        for i in range(n):
            a, b = acc[i], part[i]
            acc[i] = a if (a > b or a != a) else b


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
    if sample.dtype == types.uint16:
        return lambda desk, sample: carray(pointer(desk[SCRATCH]), BLOCK, np.float32)
    return lambda desk, sample: carray(pointer(desk[SCRATCH]), BLOCK, sample.dtype)


def _wide(desk: Any, part: Any) -> Any:
    """``part`` as it is summed: bfloat16 widened into the second half of the scratch."""


@overload(_wide, strict=False)
def _wide_typed(desk: Any, part: Any) -> Any:
    if part.dtype != types.uint16:
        return lambda desk, part: part

    def widened(desk: Any, part: Any) -> Any:
        wide = carray(pointer(desk[SCRATCH] + 4 * BLOCK), part.size, np.float32)
        _load(wide, part)
        return wide

    return widened


@_inner
def _sum_up(
    desk: Any, half: int, at: int, own: int, target: int, nbytes: int, sample: Any, op: int, boxed: bool
) -> None:
    """Combines ``nbytes`` at ``at`` of all ranks' areas (this rank's lie at ``own``) into ``target``, in rank order.

    ``op`` + 8 divides by the world size; ``boxed``: the result goes to the same place of every peer's area as well.
    """
    size, rank, item, acc = desk[SIZE], desk[RANK], sample.itemsize, _scratch(desk, sample)
    for start in range(0, nbytes, BLOCK * item):
        length = min(BLOCK * item, nbytes - start)
        n = length // item
        for peer in range(size):
            address = own if peer == rank else _area(desk, half, peer) + at
            part = carray(pointer(address + start), n, dtype=sample.dtype)
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
                    copy(_area(desk, half, peer) + at + start, target + start, length)


@_inner
def _area(desk: Any, half: int, rank: int) -> Any:
    return desk[STAGES] + (half * desk[SIZE] + rank) * desk[STAGE]


@_inner
def _two_phase(desk: Any, k: int, half: int, target: int, source: int, nbytes: int, share: int) -> None:
    """Chunk k - 2 is copied out and chunk k staged, but for this rank's share."""
    rank, width = desk[RANK], share * desk[SIZE]
    mine, old, new = _area(desk, half, rank), (k - 2) * width, k * width
    for begin, end in ((0, share * rank), (share * (rank + 1), width)):
        if k >= 2:
            copy(target + old + begin, mine + begin, min(end, nbytes - old) - begin)
        copy(mine + begin, source + new + begin, min(end, nbytes - new) - begin)


@_inner
def _stage_pieces(desk: Any, k: int, half: int, source: int, nbytes: int, width: int) -> None:
    """The peers' pieces of round k are staged."""
    for peer in range(desk[SIZE]):
        if peer != desk[RANK]:
            place = _area(desk, half, desk[RANK]) + peer * width
            copy(place, source + peer * nbytes + k * width, min(width, nbytes - k * width))


@_inner
def _collect_pieces(desk: Any, k: int, half: int, target: int, nbytes: int, width: int, at: int) -> None:
    """The peers' pieces of round k are copied out; ``at``: where they lie in the peers' areas."""
    for peer in range(desk[SIZE]):
        if k >= 0 and peer != desk[RANK]:
            here = target + peer * nbytes + k * width
            copy(here, _area(desk, half, peer) + at, min(width, nbytes - k * width))


@_inner
def _move(desk: Any, order: Any, k: int, half: int, target: int, source: int) -> None:
    """Step k of a collective that only moves."""
    kind, nbytes, rank, stage = order[KIND], order[NBYTES], desk[RANK], desk[STAGE]
    if kind == ALL_GATHER:
        _collect_pieces(desk, k - 1, 1 - half, target, nbytes, stage, 0)
        copy(_area(desk, half, rank), source + k * stage, min(stage, nbytes - k * stage))
        if k == 0 and target + rank * nbytes != source:
            copy(target + rank * nbytes, source, nbytes)
    elif kind == ALL_TO_ALL:
        width = stage // desk[SIZE] // 64 * 64
        _collect_pieces(desk, k - 1, 1 - half, target, nbytes, width, rank * width)
        _stage_pieces(desk, k, half, source, nbytes, width)
        if k == 0 and target != source:
            copy(target + rank * nbytes, source + rank * nbytes, nbytes)
    elif kind == BROADCAST:
        root = order[OP]
        if rank == root:
            copy(_area(desk, half, root), target + k * stage, min(stage, nbytes - k * stage))
        elif k >= 1:
            old = (k - 1) * stage
            copy(target + old, _area(desk, 1 - half, root), min(stage, nbytes - old))


@_inner
def _step(desk: Any, order: Any, k: int, half: int, target: int, source: int, sample: Any) -> None:
    kind, nbytes, rank = order[KIND], order[NBYTES], desk[RANK]
    share = desk[STAGE] // sample.itemsize // desk[SIZE] // 64 * 64 * sample.itemsize
    at = own = here = length = 0
    if kind < ONE_SHOT:
        _move(desk, order, k, half, target, source)
    elif kind == ONE_SHOT:
        if k == 0:
            copy(_area(desk, half, rank), source, nbytes)
        length = nbytes
    elif kind == ALL_REDUCE:
        _two_phase(desk, k, half, target, source, nbytes, share)
        at = share * rank
        own = here = (k - 1) * share * desk[SIZE] + at
        length = min(share, nbytes - here)
    else:
        _stage_pieces(desk, k, half, source, nbytes, share)
        at, here = share * rank, (k - 1) * share
        own, length = rank * nbytes + here, min(share, nbytes - here)
    if k >= 1 and length > 0:
        _sum_up(desk, 1 - half, at, source + own, target + here, length, sample, order[OP], kind == ALL_REDUCE)


@_entry
def step(desk_at: int, order_at: int, k: int, meeting: int, target: int, source: int, sample: Any) -> None:
    """Step ``k`` of a collective whose first meeting has the number ``meeting``.

    ``desk_at``, ``order_at``: the addresses of the `DESK` and the `ORDER`, in which ``nbytes`` is of the tensor, of one
    rank's piece for ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER; ``op`` as in `_combine`, + 8 for AVG, or the root.
    ``target``, ``source``: addresses of output and input. ``sample``: an array of the dtype (uint16: bfloat16).
    """
    desk, order = carray(pointer(desk_at), len(DESK), np.int64), carray(pointer(order_at), len(ORDER), np.int64)
    _step(desk, order, k, (meeting + k) & 1, target, source, sample)


@_inner
def _meet(desk: Any, meeting: int, patience: int) -> bool:
    """Arrives at a meeting and waits for the others for ``patience`` ns at most; whether all have come."""
    size = desk[SIZE]
    here = desk[COUNTERS] + 64 * (meeting & 3)
    before = count_up(here)
    tell(desk[BEGUN], meeting + 1)
    if before == size - 1:
        wake(here)
    else:
        for _ in range(_SPINS):
            if look(here) == size:
                break
        else:
            limit = now() + patience
            there = look(here)
            while there != size:
                if now() > limit:
                    return False
                pause(here, there, limit, desk[CROWDED])
                there = look(here)
    if desk[RANK] == 0:  # nobody looks at the previous meeting's counter any more
        clear(desk[COUNTERS] + 64 * ((meeting - 1) & 3))
    return True


@_inner
def _differ(desk: Any, half: int, header_at: int) -> bool:
    """Whether the headers of a meeting are not all as the one at ``header_at``."""
    words = desk[HEADER] // 8
    mine = carray(pointer(header_at), words, np.int64)
    for rank in range(desk[SIZE]):
        theirs = carray(pointer(desk[HEADERS] + (half * desk[SIZE] + rank) * desk[HEADER]), words, np.int64)
        for i in range(words):
            if theirs[i] != mine[i]:
                return True
    return False


@_entry
def run(
    desk_at: int, order_at: int, header_at: int, number: int, done: int, meeting: int, patience: int,
    target: int, source: int, sample: Any,
) -> int:  # fmt: skip
    """Carries call no. ``number`` of this rank, the one after ``done``, out, and keeps its records; see `DONE`.

    ``number``: 0 for a call that has waited for its turn, and was noted as issued before that.

    ``header_at``: the address of the call's header; ``patience``: ns it may wait at a meeting; the rest as in `step`.
    """
    desk, order = carray(pointer(desk_at), len(DESK), np.int64), carray(pointer(order_at), len(ORDER), np.int64)
    half, meetings = meeting & 1, order[MEETINGS]
    if number > 0:
        moment = now()
        note(desk[ISSUED_AT] + 8 * (number % desk[ISSUED_KEPT]), moment)
        note(desk[MOMENTS] + 8 * (number % desk[KEPT]), moment)
        note(desk[ISSUED], number)
    mine = desk[HEADERS] + (half * desk[SIZE] + desk[RANK]) * desk[HEADER]
    copy(mine, header_at, desk[HEADER])
    note(desk[HEADER_AT], mine - desk[BASE])
    for k in range(meetings + 1):
        _step(desk, order, k, (meeting + k) & 1, target, source, sample)
        if k == meetings:
            break
        if not _meet(desk, meeting + k, patience):
            return 4 * k + WAITS
        if k == 0 and _differ(desk, half, header_at):
            return DIFFERS
    moment = now()
    note(desk[COMPLETED], done + 1)
    note(desk[COMPLETED_AT], moment)
    note(desk[ENDS] + 8 * ((done + 1) % desk[KEPT]), moment)
    return DONE

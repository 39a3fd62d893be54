"""Whole collectives as compiled loops: stage, meet, compare headers, reduce and collect in one call, without the
interpreter. Needs numba (`unisono[fast]`), and is imported only where the loops are compiled (loops.py).

What is written where, and how often the ranks meet, is what the programs do (run/programs.py): a rank may come this
way while its peers take the other. Every kind of collective is cut into the same steps: step k collects what meeting
k - 1 brought, then stages what meeting k shall; the last only collects. `step` carries one out, for calls whose
meetings the lane waits for; `run` carries all out and meets in between, and returns early where a peer keeps it
waiting for ``patience`` ns: nobody looks for lost peers in here.

Sums have the bits of run/reduce.py: in rank order, bfloat16 accumulated in float32 and rounded once.

A meeting is an atomic add (transport/atomics.py). Sleepers are woken by the last to arrive: its add comes before its
FUTEX_WAKE, and FUTEX_WAIT compares the word again under the kernel's lock.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from unisono.run import fused_words as words
from unisono.run.fused_direct import UNREADY, abandoned, go, lay, verdict
from unisono.run.fused_steps import carry
from unisono.run.offers import AGAIN, DIRECT, STAGED
from unisono.transport.atomics import clear, count_up, inner, look, pointer, tell, woven
from unisono.transport.native import copy, note, now, pause, wake

__all__ = ["loops_of"]

_SPINS = 100


@woven
def _papers(desk_at: int, order_at: int) -> Any:
    """The desk and the order, see fused_words.py."""
    return carray(pointer(desk_at), len(words.DESK), np.int64), carray(pointer(order_at), len(words.ORDER), np.int64)


@woven
def _step(desk: Any, order: Any, k: int, mode: int, meeting: int, target: int, source: int, sample: Any) -> None:
    if mode >= DIRECT:
        go(desk, order, k, mode, meeting, target, source, sample)
    else:
        carry(desk, order, k, (meeting + k) & 1, target, source, sample)


@inner
def _meet(desk: Any, meeting: int, patience: int) -> bool:
    """Arrives at a meeting and waits for the others for ``patience`` ns at most; whether all have come."""
    size = desk[words.SIZE]
    here = desk[words.COUNTERS] + 64 * (meeting & 3)
    before = count_up(here)
    tell(desk[words.BEGUN], meeting + 1)
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
                pause(here, there, limit, desk[words.CROWDED])
                there = look(here)
    if desk[words.RANK] == 0:  # nobody looks at the previous meeting's counter any more
        clear(desk[words.COUNTERS] + 64 * ((meeting - 1) & 3))
    return True


@inner
def _differ(desk: Any, half: int, header_at: int, stride: int) -> bool:
    """Whether the headers of a meeting are not as those from ``header_at`` on, ``stride`` bytes from rank to rank."""
    length = desk[words.HEADER] // 8
    for rank in range(desk[words.SIZE]):
        mine = carray(pointer(header_at + stride * rank), length, np.int64)
        theirs = carray(
            pointer(desk[words.HEADERS] + (half * desk[words.SIZE] + rank) * desk[words.HEADER]), length, np.int64
        )
        for i in range(length):
            if theirs[i] != mine[i]:
                return True
    return False


@woven
def _run(
    desk: Any, order: Any, header_at: int, number: int, done: int, meeting: int, patience: int,
    target: int, source: int, sample: Any,
) -> int:  # fmt: skip
    """See `loops_of`."""
    stride = order[words.STRIDE]
    if number > 0:
        moment = now()
        note(desk[words.ISSUED_AT] + 8 * (number % desk[words.ISSUED_KEPT]), moment)
        note(desk[words.MOMENTS] + 8 * (number % desk[words.KEPT]), moment)
        note(desk[words.ISSUED], number)
    mine = desk[words.HEADERS] + ((meeting & 1) * desk[words.SIZE] + desk[words.RANK]) * desk[words.HEADER]
    copy(mine, header_at + stride * desk[words.RANK], desk[words.HEADER])
    note(desk[words.HEADER_AT], mine - desk[words.BASE])
    k, last, mode, unready, first = 0, order[words.MEETINGS], STAGED, False, meeting
    if order[words.ROUNDS] == 0 or not lay(desk, order, meeting, target, source):
        _step(desk, order, 0, mode, meeting, target, source, sample)
    while k < last:
        if not _meet(desk, meeting + k, patience):
            return 16 * k + 4 * mode + words.WAITS
        k += 1
        if k == 1 and mode == STAGED:
            if _differ(desk, first & 1, header_at, stride):
                return words.DIFFERS
            if order[words.ROUNDS] > 0:
                mode = verdict(desk, order, first)
                unready, mode = mode >= UNREADY, mode % UNREADY
                if mode == AGAIN:
                    k, meeting = 0, meeting + 1
                elif mode >= DIRECT:
                    last = order[words.ROUNDS] + 1
        _step(desk, order, k, mode, meeting, target, source, sample)
    if mode >= DIRECT and abandoned(desk, done + 1):
        return 4 * mode + words.UNSURE
    moment = now()
    note(desk[words.COMPLETED], done + 1)
    note(desk[words.COMPLETED_AT], moment)
    note(desk[words.ENDS] + 8 * ((done + 1) % desk[words.KEPT]), moment)
    return 4 * mode + (words.UNSURE if unready else words.DONE)


def loops_of(dtype_name: str) -> dict[str, Callable[..., int]]:
    """The loops for a dtype (by numpy's name, see fused_sums.py), which take addresses and numbers."""
    dtype = getattr(np, dtype_name)

    def run(
        desk_at: int, order_at: int, header_at: int, number: int, done: int, meeting: int, patience: int,
        target: int, source: int,
    ) -> Any:  # fmt: skip
        """Carries call no. ``number`` of this rank, the one after ``done``, out, and keeps its records; see `DONE`.

        ``number``: 0 for a call that has waited for its turn, and was noted as issued before that.

        ``header_at``: the address of the header, or of those of all ranks; ``patience``: ns it may wait at a meeting;
        the rest as in `step`.
        """
        desk, order = _papers(desk_at, order_at)
        sample = carray(pointer(0), 0, dtype)
        return _run(desk, order, header_at, number, done, meeting, patience, target, source, sample)

    def step(desk_at: int, order_at: int, k: int, mode: int, meeting: int, target: int, source: int) -> int:
        """Step ``k`` of a collective whose first meeting has the number ``meeting``; ``mode``: the verdict on it.

        ``desk_at``, ``order_at``: the addresses of the desk and the order, see fused_words.py. ``target``, ``source``:
        addresses of output and input, or of the tables of their addresses.
        """
        desk, order = _papers(desk_at, order_at)
        _step(desk, order, k, mode, meeting, target, source, carray(pointer(0), 0, dtype))
        return 0

    return {"run": run, "step": step}

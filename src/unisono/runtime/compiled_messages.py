"""Messages as compiled loops: head, payload, counts and bell in one call, without the interpreter. Needs numba.

What is written where is what runtime/flow.py does: either end of a message may come this way while the other takes the
long one. A loop carries several messages, one for each end of a ring at most, in turn, piece by piece: a rank that
waits for what it receives sends meanwhile. It comes back when a message is done, where the peers keep it waiting for
``patience`` ns, or when it has moved for `_LONGEST`: nobody looks for lost peers, or serves others, in here. What has
moved by then counts; the lane goes on from there.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from unisono.runtime import message_words as words
from unisono.transport.atomics import (
    fetch_add,
    inner,
    load_acquire32,
    load_acquire64,
    on_stack,
    pointer,
    relax,
    store_release64,
)
from unisono.transport.native import copy, now, pause, sleep, store, wake
from unisono.transport.ring import UNIT

__all__ = ["LOOPS"]

_UNIT, _WORDS = UNIT, len(words.JOB)
_PIECE = 64 * 1024  # bytes moved before the peer is told
_LONGEST = 50_000_000  # ns


@inner
def _add(address: int, value: int) -> Any:
    total = load_acquire64(address) + value
    store(address, total)
    return total


@inner
def _tell(table: Any, count: int, total: int, peer: int) -> None:
    """Publishes a count of bytes, and rings the peer's bell."""
    store_release64(count, total)
    bell = table[words.BELLS] + 64 * peer
    fetch_add(bell, 1)
    wake(bell)


@inner
def _control(table: Any, source: int, target: int) -> Any:
    return table[words.CONTROLS] + (source * table[words.SIZE] + target) * table[words.CONTROL]


@inner
def _ring(table: Any, source: int, target: int) -> Any:
    return table[words.RINGS] + (source * table[words.SIZE] + target) * table[words.CAPACITY]


@inner
def _same(head: int, other: int) -> bool:
    differences = 0
    for at in range(0, _UNIT, 8):
        differences |= load_acquire64(head + at) ^ load_acquire64(other + at)
    return differences == 0


@inner
def _push(table: Any, job: Any) -> Any:
    """Puts a piece of a message into its ring, behind its head; whether anything could go."""
    capacity, peer = table[words.CAPACITY], job[words.PEER]
    control, data = _control(table, table[words.RANK], peer), _ring(table, table[words.RANK], peer)
    told = load_acquire64(control)
    room, written = capacity + load_acquire64(control + 64) - told, told
    if job[words.BEGUN] == 0:
        if room < _UNIT:
            return False
        copy(data + written % capacity, job[words.HEAD], _UNIT)
        job[words.BEGUN], room, written = 1, room - _UNIT, written + _UNIT
    at, left = written % capacity, job[words.NBYTES] - job[words.MOVED]
    part = max(0, min(left, room, capacity - at, _PIECE))
    copy(data + at, job[words.DATA] + job[words.MOVED], part)
    job[words.MOVED] += part
    written += part if part < left else -(-part // _UNIT) * _UNIT
    if written == told:
        return False
    _tell(table, control, written, peer)
    return True


@inner
def _take(table: Any, job: Any) -> Any:
    """Takes a piece of a message, behind its head, out of its ring; whether anything was there, `OTHER` included."""
    capacity, peer = table[words.CAPACITY], job[words.PEER]
    control, data = _control(table, peer, table[words.RANK]), _ring(table, peer, table[words.RANK])
    told = load_acquire64(control + 64)
    there, taken = load_acquire64(control) - told, told
    if job[words.BEGUN] == 0:
        if there < _UNIT:
            return False
        if not _same(data + taken % capacity, job[words.HEAD]):
            job[words.BEGUN] = words.OTHER
            return True
        _add(control + 64 + 8, 1)
        job[words.BEGUN], there, taken = 1, there - _UNIT, taken + _UNIT
    at, left = taken % capacity, job[words.NBYTES] - job[words.MOVED]
    part = max(0, min(left, there, capacity - at, _PIECE))
    copy(job[words.DATA] + job[words.MOVED], data + at, part)
    job[words.MOVED] += part
    taken += part if part < left else -(-part // _UNIT) * _UNIT
    if taken == told:
        return False
    _tell(table, control + 64, taken, peer)
    return True


@inner
def _move(table: Any, jobs: Any, patience: int) -> None:
    """Carries all ``jobs``, a piece of each in turn, until one of them needs the lane's attention or none can go on."""
    bell, until, limit, spins = table[words.BELLS] + 64 * table[words.RANK], now() + _LONGEST, 0, 0
    while True:
        table[words.HEARD] = load_acquire32(bell)
        moved = ended = False
        for k in range(len(jobs)):
            job = jobs[k]
            if _push(table, job) if job[words.SENDS] else _take(table, job):
                moved = True
            if job[words.BEGUN] == words.OTHER or (job[words.BEGUN] and job[words.MOVED] == job[words.NBYTES]):
                ended = True
        if ended or (moved and now() > until):
            table[words.HEARD] -= 1  # for there may be more to do at once
            return
        if moved:
            spins = limit = 0
            continue
        spins += 1
        if spins < table[words.SPINS]:
            relax()
            continue
        if limit == 0:
            limit = now() + patience
        if now() >= limit:
            return
        pause(bell, table[words.HEARD], limit, table[words.CROWDED])


@inner
def _lay(job: Any, sends: int, peer: int, head: int, data: int, nbytes: int) -> None:
    """Lays out a message that has not begun."""
    job[words.SENDS], job[words.PEER], job[words.HEAD], job[words.DATA] = sends, peer, head, data
    job[words.NBYTES], job[words.MOVED], job[words.BEGUN] = nbytes, 0, 0


def carry(table_at: int, jobs_at: int, count: int, patience: int) -> int:
    """Carries the ``count`` jobs at ``jobs_at``, none of them done, until one is, or has met `OTHER`."""
    table = carray(pointer(table_at), len(words.TABLE), np.int64)
    _move(table, carray(pointer(jobs_at), (count, _WORDS), np.int64), patience)
    return 0


def send(table_at: int, peer: int, head_at: int, source: int, nbytes: int, patience: int) -> Any:
    """Puts a message of ``nbytes`` at ``source``, whose head is at ``head_at``, into the ring to ``peer``.

    ``table_at``: the address of a `TABLE`. Returns how many bytes of the payload are in the ring, or `SILENT`.
    """
    table = carray(pointer(table_at), len(words.TABLE), np.int64)
    posted = _control(table, table[words.RANK], peer) + 8
    _add(posted, 1)
    jobs = carray(pointer(on_stack(_WORDS)), (1, _WORDS), np.int64)
    _lay(jobs[0], 1, peer, head_at, source, nbytes)
    _move(table, jobs, patience)
    if not jobs[0, words.BEGUN]:
        _add(posted, -1)
        return words.SILENT
    return jobs[0, words.MOVED]


def recv(table_at: int, peer: int, head_at: int, target: int, nbytes: int, patience: int) -> Any:
    """Takes the next message from ``peer``, if its head is the one at ``head_at``, to ``target``.

    Returns how many bytes of the payload have been taken, or `SILENT`, or `OTHER`. A receive of which there is a rest
    stays counted among those that are out.
    """
    table = carray(pointer(table_at), len(words.TABLE), np.int64)
    wanted = _control(table, peer, table[words.RANK]) + 64 + 16
    _add(wanted, 1)
    jobs = carray(pointer(on_stack(_WORDS)), (1, _WORDS), np.int64)
    _lay(jobs[0], 0, peer, head_at, target, nbytes)
    _move(table, jobs, patience)
    begun, moved = jobs[0, words.BEGUN], jobs[0, words.MOVED]
    if begun != 1 or moved == nbytes:
        _add(wanted, -1)
    return moved if begun == 1 else words.SILENT if begun == 0 else words.OTHER


def nap(table_at: int, heard: int, nanoseconds: int) -> int:
    """Sleeps, for less than a second, until this rank's bell rings, unless its count differs from ``heard``."""
    table = carray(pointer(table_at), len(words.TABLE), np.int64)
    sleep(table[words.BELLS] + 64 * table[words.RANK], heard, nanoseconds)
    return 0


LOOPS: dict[str, Callable[..., int]] = {"send": send, "recv": recv, "nap": nap, "carry": carry}

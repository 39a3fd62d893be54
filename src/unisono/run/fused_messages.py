"""Messages as compiled loops: head, payload, counts and bell in one call, without the interpreter. Needs numba.

What is written where is what run/flow.py does: either end of a message may come this way while the other takes the long
one. A loop carries several messages, one for each end of a ring at most, in turn, piece by piece: a rank that waits for
what it receives sends meanwhile. It comes back when a message is done, where the peers keep it waiting for ``patience``
ns, or when it has moved for `_LONGEST`: nobody looks for lost peers, or serves others, in here. What has moved by then
counts; the lane goes on from there.
"""

from typing import Any

import numpy as np
from numba import njit
from numba.np.numpy_support import carray

from unisono.run.fused_entry import entry
from unisono.run.fused_words import OTHER, SILENT
from unisono.transport.atomics import count_up, look, pointer, read, tell
from unisono.transport.native import copy, note, now, pause, sleep, wake
from unisono.transport.ring import UNIT

__all__ = ["JOB", "TABLE", "carry", "nap", "recv", "send"]

TABLE = ("capacity", "rings", "controls", "control", "bells", "rank", "size", "crowded", "heard")
"""The words of a table (int64), in order: bytes of a ring, where the rings' data and their controls begin, bytes of a
control, where the bells begin, who this is among how many, where `CROWDED` of futex.py lies; and, written by `carry`,
this rank's bell as it was before the last look into the rings."""
CAPACITY, RINGS, CONTROLS, CONTROL, BELLS, RANK, SIZE, CROWDED, HEARD = range(9)
JOB = ("sends", "peer", "head", "data", "nbytes", "moved", "begun")
"""The words of a job (int64), a message on its way: whether it is sent, to or from whom, where its head lies (what it
has to be, of one that is received) and where its payload, of how many bytes; and, written by the loops, how many of
them have moved, and whether the head has: 0, 1, or `OTHER`."""
SENDS, PEER, HEAD, DATA, NBYTES, MOVED, BEGUN = range(7)

_SPINS = 100
_UNIT = UNIT
_PIECE = 64 * 1024  # bytes moved before the peer is told
_LONGEST = 50_000_000  # ns
_inner = njit(nogil=True)


@_inner
def _add(address: int, value: int) -> Any:
    total = read(address) + value
    note(address, total)
    return total


@_inner
def _tell(table: Any, count: int, total: int, peer: int) -> None:
    """Publishes a count of bytes, and rings the peer's bell."""
    tell(count, total)
    bell = table[BELLS] + 64 * peer
    count_up(bell)
    wake(bell)


@_inner
def _control(table: Any, source: int, target: int) -> Any:
    return table[CONTROLS] + (source * table[SIZE] + target) * table[CONTROL]


@_inner
def _ring(table: Any, source: int, target: int) -> Any:
    return table[RINGS] + (source * table[SIZE] + target) * table[CAPACITY]


@_inner
def _same(head: int, other: int) -> bool:
    differences = 0
    for at in range(0, _UNIT, 8):
        differences |= read(head + at) ^ read(other + at)
    return differences == 0


@_inner
def _push(table: Any, job: Any) -> Any:
    """Puts a piece of a message into its ring, behind its head; whether anything could go."""
    capacity, peer = table[CAPACITY], job[PEER]
    control, data = _control(table, table[RANK], peer), _ring(table, table[RANK], peer)
    told = read(control)
    room, written = capacity + read(control + 64) - told, told
    if job[BEGUN] == 0:
        if room < _UNIT:
            return False
        copy(data + written % capacity, job[HEAD], _UNIT)
        job[BEGUN], room, written = 1, room - _UNIT, written + _UNIT
    at, left = written % capacity, job[NBYTES] - job[MOVED]
    part = max(0, min(left, room, capacity - at, _PIECE))
    copy(data + at, job[DATA] + job[MOVED], part)
    job[MOVED] += part
    written += part if part < left else -(-part // _UNIT) * _UNIT
    if written == told:
        return False
    _tell(table, control, written, peer)
    return True


@_inner
def _take(table: Any, job: Any) -> Any:
    """Takes a piece of a message, behind its head, out of its ring; whether anything was there, `OTHER` included."""
    capacity, peer = table[CAPACITY], job[PEER]
    control, data = _control(table, peer, table[RANK]), _ring(table, peer, table[RANK])
    told = read(control + 64)
    there, taken = read(control) - told, told
    if job[BEGUN] == 0:
        if there < _UNIT:
            return False
        if not _same(data + taken % capacity, job[HEAD]):
            job[BEGUN] = OTHER
            return True
        _add(control + 64 + 8, 1)
        job[BEGUN], there, taken = 1, there - _UNIT, taken + _UNIT
    at, left = taken % capacity, job[NBYTES] - job[MOVED]
    part = max(0, min(left, there, capacity - at, _PIECE))
    copy(job[DATA] + job[MOVED], data + at, part)
    job[MOVED] += part
    taken += part if part < left else -(-part // _UNIT) * _UNIT
    if taken == told:
        return False
    _tell(table, control + 64, taken, peer)
    return True


@_inner
def _move(table: Any, jobs: Any, patience: int) -> None:
    """Carries all ``jobs``, a piece of each in turn, until one of them needs the lane's attention or none can go on."""
    bell, until, limit, spins = table[BELLS] + 64 * table[RANK], now() + _LONGEST, 0, 0
    while True:
        table[HEARD] = look(bell)
        moved = ended = False
        for k in range(len(jobs)):
            job = jobs[k]
            if _push(table, job) if job[SENDS] else _take(table, job):
                moved = True
            if job[BEGUN] == OTHER or (job[BEGUN] and job[MOVED] == job[NBYTES]):
                ended = True
        if ended or (moved and now() > until):
            table[HEARD] -= 1  # for there may be more to do at once
            return
        if moved:
            spins = limit = 0
            continue
        spins += 1
        if spins < _SPINS:
            continue
        if limit == 0:
            limit = now() + patience
        if now() >= limit:
            return
        pause(bell, table[HEARD], limit, table[CROWDED])


@entry
def carry(table_at: int, jobs_at: int, count: int, patience: int) -> None:
    """Carries the ``count`` jobs at ``jobs_at``, none of them done, until one is, or has met `OTHER`."""
    _move(
        carray(pointer(table_at), len(TABLE), np.int64), carray(pointer(jobs_at), (count, len(JOB)), np.int64), patience
    )


@entry
def send(table_at: int, peer: int, head_at: int, source: int, nbytes: int, patience: int) -> Any:
    """Puts a message of ``nbytes`` at ``source``, whose head is at ``head_at``, into the ring to ``peer``.

    ``table_at``: the address of a `TABLE`. Returns how many bytes of the payload are in the ring, or `SILENT`.
    """
    table = carray(pointer(table_at), len(TABLE), np.int64)
    posted = _control(table, table[RANK], peer) + 8
    _add(posted, 1)
    jobs = np.array([[1, peer, head_at, source, nbytes, 0, 0]], np.int64)
    _move(table, jobs, patience)
    if not jobs[0, BEGUN]:
        _add(posted, -1)
        return SILENT
    return jobs[0, MOVED]


@entry
def recv(table_at: int, peer: int, head_at: int, target: int, nbytes: int, patience: int) -> Any:
    """Takes the next message from ``peer``, if its head is the one at ``head_at``, to ``target``.

    Returns how many bytes of the payload have been taken, or `SILENT`, or `OTHER`. A receive of which there is a rest
    stays counted among those that are out.
    """
    table = carray(pointer(table_at), len(TABLE), np.int64)
    wanted = _control(table, peer, table[RANK]) + 64 + 16
    _add(wanted, 1)
    jobs = np.array([[0, peer, head_at, target, nbytes, 0, 0]], np.int64)
    _move(table, jobs, patience)
    begun, moved = jobs[0, BEGUN], jobs[0, MOVED]
    if begun != 1 or moved == nbytes:
        _add(wanted, -1)
    return moved if begun == 1 else SILENT if begun == 0 else OTHER


@entry
def nap(table_at: int, heard: int, nanoseconds: int) -> None:
    """Sleeps, for less than a second, until this rank's bell rings, unless its count differs from ``heard``."""
    table = carray(pointer(table_at), len(TABLE), np.int64)
    sleep(table[BELLS] + 64 * table[RANK], heard, nanoseconds)

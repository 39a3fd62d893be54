"""Messages as compiled loops: head, payload, counts and bell in one call, without the interpreter. Needs numba.

What is written where is what run/point_to_point.py does: either end of a message may come this way while the other
takes the long one. A loop gives up where its peer keeps it waiting for ``patience`` ns, or it has moved for `_LONGEST`:
nobody looks for lost peers, or serves others, in here. What has moved by then counts; the lane goes on from there.
"""

from typing import Any

import numpy as np
from numba import njit
from numba.np.numpy_support import carray

from unisono.transport.atomics import count_up, look, pointer, read, tell
from unisono.transport.native import copy, note, now, pause, sleep, wake
from unisono.transport.ring import UNIT

__all__ = ["OTHER", "SILENT", "TABLE", "nap", "recv", "send"]

TABLE = ("capacity", "rings", "controls", "control", "bells", "rank", "size", "crowded")
"""The words of a table (int64), in order: bytes of a ring, where the rings' data and their controls begin, bytes of a
control, where the bells begin, who this is among how many, where `CROWDED` of futex.py lies."""
CAPACITY, RINGS, CONTROLS, CONTROL, BELLS, RANK, SIZE, CROWDED = range(8)
SILENT, OTHER = -1, -2
"""Instead of the bytes moved: nothing has come, or can go; another message has come than the one that is expected."""

_SPINS = 100
_UNIT = UNIT
_PIECE = 128 * 1024  # bytes moved before the peer is told
_LONGEST = 50_000_000  # ns
_entry, _inner = njit(nogil=True, cache=True), njit(nogil=True)


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
def _wait(table: Any, ours: int, theirs: int, least: int, patience: int) -> Any:
    """Waits until their count is ahead of ours by ``least``; by how much it is then."""
    for _ in range(_SPINS):
        ahead = read(theirs) - ours
        if ahead >= least:
            return ahead
    bell, limit = table[BELLS] + 64 * table[RANK], now() + patience
    while True:
        heard = look(bell)
        ahead = read(theirs) - ours
        if ahead >= least or now() > limit:
            return ahead
        pause(bell, heard, limit, table[CROWDED])


@_entry
def send(table_at: int, peer: int, head_at: int, source: int, nbytes: int, patience: int) -> Any:
    """Puts a message of ``nbytes`` at ``source``, whose head is at ``head_at``, into the ring to ``peer``.

    ``table_at``: the address of a `TABLE`. Returns how many bytes of the payload are in the ring, or `SILENT`.
    """
    table = carray(pointer(table_at), len(TABLE), np.int64)
    pair, capacity = table[RANK] * table[SIZE] + peer, table[CAPACITY]
    control, data = table[CONTROLS] + pair * table[CONTROL], table[RINGS] + pair * capacity
    written, taken, moved = read(control), control + 64, 0
    if capacity + _wait(table, written, taken, _UNIT - capacity, patience) < _UNIT:
        return SILENT
    _add(control + 8, 1)
    copy(data + written % capacity, head_at, _UNIT)
    told, written, until = written, written + _UNIT, now() + _LONGEST
    while True:
        room = capacity + read(taken) - written
        at = written % capacity
        part = min(nbytes - moved, room, capacity - at, _PIECE)
        copy(data + at, source + moved, part)
        moved += max(0, part)
        written += part if moved < nbytes else -(-part // _UNIT) * _UNIT
        if written > told:
            _tell(table, control, written, peer)
            told = written
        if moved == nbytes:
            return moved
        if now() > until or (part <= 0 and capacity + _wait(table, written, taken, _UNIT - capacity, patience) < _UNIT):
            return moved


@_entry
def recv(table_at: int, peer: int, head_at: int, target: int, nbytes: int, patience: int) -> Any:
    """Takes the next message from ``peer``, if its head is the one at ``head_at``, to ``target``.

    Returns how many bytes of the payload have been taken, or `SILENT`, or `OTHER`. A receive of which there is a rest
    stays counted among those that are out.
    """
    table = carray(pointer(table_at), len(TABLE), np.int64)
    pair, capacity = peer * table[SIZE] + table[RANK], table[CAPACITY]
    control, data = table[CONTROLS] + pair * table[CONTROL], table[RINGS] + pair * capacity
    place, moved = control + 64, 0
    taken = read(place)
    opened, wanted = place + 8, place + 16
    _add(wanted, 1)
    outcome = 0
    if _wait(table, taken, control, _UNIT, patience) < _UNIT:
        outcome = SILENT
    elif not _same(data + taken % capacity, head_at):
        outcome = OTHER
    if outcome:
        _add(wanted, -1)
        return outcome
    _add(opened, 1)
    told, taken, until = taken, taken + _UNIT, now() + _LONGEST
    while True:
        at = taken % capacity
        part = min(nbytes - moved, read(control) - taken, capacity - at, _PIECE)
        copy(target + moved, data + at, part)
        moved += max(0, part)
        taken += part if moved < nbytes else -(-part // _UNIT) * _UNIT
        if taken > told:
            _tell(table, place, taken, peer)
            told = taken
        if moved == nbytes:
            _add(wanted, -1)
            return moved
        if now() > until or (part <= 0 and _wait(table, taken, control, _UNIT, patience) < _UNIT):
            return moved


@_entry
def nap(table_at: int, heard: int, nanoseconds: int) -> None:
    """Sleeps, for less than a second, until this rank's bell rings, unless its count differs from ``heard``."""
    table = carray(pointer(table_at), len(TABLE), np.int64)
    sleep(table[BELLS] + 64 * table[RANK], heard, nanoseconds)


@_inner
def _same(head: int, other: int) -> bool:
    differences = 0
    for at in range(0, _UNIT, 8):
        differences |= read(head + at) ^ read(other + at)
    return differences == 0

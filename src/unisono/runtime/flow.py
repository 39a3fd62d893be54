"""The bytes of messages on their way into a ring and out of it."""

from collections.abc import Callable

import torch

from unisono.errors import UnisonoError
from unisono.runtime.message import Arriving, Message, head, padded
from unisono.transport.futex import Counter
from unisono.transport.ring import UNIT, Ring

__all__ = ["copy", "push", "take"]

_PIECE = 128 * 1024  # bytes moved before the peer is told


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies bytes of a user's tensor; raises `UnisonoError` where that fails."""
    try:
        target.copy_(source)
    except (RuntimeError, MemoryError) as error:
        raise UnisonoError(f"a message could not be copied: {type(error).__name__}: {error}") from error


def _tell(publish: Callable[[int], None], nbytes: int, bell: Counter) -> None:
    publish(nbytes)
    bell.add()


def push(message: Message, ring: Ring, bell: Counter) -> bool:
    """Moves what fits of a message into the ring; whether all of it is in. See `copy`.

    Nothing of it, not even its head, is in the ring before the reader is told of it.
    """
    data = message.data
    nbytes, room, news = data.numel(), ring.room(), 0
    if not message.started:
        if room < UNIT:
            return False
        room, news = room - UNIT, UNIT
    while message.moved < nbytes and room > 0:
        at = ring.write_place(news)
        part = min(nbytes - message.moved, room, ring.capacity - at, _PIECE)
        copy(ring.data[at : at + part], data[message.moved : message.moved + part])
        message.moved += part
        step = padded(part) if message.moved == nbytes else part
        news, room = news + step, room - step
        if news >= _PIECE:
            _publish(message, ring, news, bell)
            news, room = 0, ring.room()
    if news:
        _publish(message, ring, news, bell)
    return message.moved == nbytes


def _publish(message: Message, ring: Ring, nbytes: int, bell: Counter) -> None:
    if not message.started:
        ring.put_head(head(message.call, message.tag, message.data.numel()))
        message.started, message.number = True, ring.heads
    _tell(ring.written, nbytes, bell)


def take(arriving: Arriving, ring: Ring, bell: Counter) -> bool:
    """Copies what is there of a message; whether all of it is taken. See `copy`."""
    gone, arriving.owed = arriving.owed, 0
    try:
        while arriving.moved < arriving.nbytes:
            available = ring.there() - gone
            left = arriving.nbytes - arriving.moved
            at = (ring.read_place() + gone) % ring.capacity
            part = min(left, available, ring.capacity - at)
            if part <= 0:
                break
            if arriving.into is not None:
                copy(arriving.into[arriving.moved : arriving.moved + part], ring.data[at : at + part])
            arriving.moved += part
            gone += padded(part) if arriving.moved == arriving.nbytes else part
            if gone >= _PIECE:
                _tell(ring.taken, gone, bell)
                gone = 0
    finally:
        if gone:
            _tell(ring.taken, gone, bell)
    return arriving.moved == arriving.nbytes

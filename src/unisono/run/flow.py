"""The bytes of messages on their way into a ring and out of it."""

from collections.abc import Callable

from unisono.run.message import Arriving, Message, head, padded
from unisono.transport.futex import Counter
from unisono.transport.ring import UNIT, Ring

__all__ = ["push", "take"]

_PIECE = 128 * 1024  # bytes moved before the peer is told


def _tell(publish: Callable[[int], None], nbytes: int, bell: Counter) -> None:
    publish(nbytes)
    bell.add()


def push(message: Message, ring: Ring, bell: Counter) -> bool:
    """Moves what fits of a message into the ring; whether all of it is in."""
    data = message.data
    nbytes, room, news = data.numel(), ring.room(), 0
    if not message.started:
        if room < UNIT:
            return False
        ring.put_head(head(message.call, message.tag, nbytes))
        message.started, message.number, room, news = True, ring.heads, room - UNIT, UNIT
    while message.moved < nbytes and room > 0:
        at = ring.write_place(news)
        part = min(nbytes - message.moved, room, ring.capacity - at, _PIECE)
        ring.data[at : at + part].copy_(data[message.moved : message.moved + part])
        message.moved += part
        step = padded(part) if message.moved == nbytes else part
        news, room = news + step, room - step
        if news >= _PIECE:
            _tell(ring.written, news, bell)
            news, room = 0, ring.room()
    if news:
        _tell(ring.written, news, bell)
    return message.moved == nbytes


def take(arriving: Arriving, ring: Ring, bell: Counter) -> bool:
    """Copies what is there of a message; whether all of it is taken."""
    gone, arriving.owed = arriving.owed, 0
    while arriving.moved < arriving.nbytes:
        available = ring.there() - gone
        left = arriving.nbytes - arriving.moved
        at = (ring.read_place() + gone) % ring.capacity
        part = min(left, available, ring.capacity - at)
        if part <= 0:
            break
        if arriving.into is not None:
            arriving.into[arriving.moved : arriving.moved + part].copy_(ring.data[at : at + part])
        arriving.moved += part
        gone += padded(part) if arriving.moved == arriving.nbytes else part
        if gone >= _PIECE:
            _tell(ring.taken, gone, bell)
            gone = 0
    if gone:
        _tell(ring.taken, gone, bell)
    return arriving.moved == arriving.nbytes

"""Rejected messages: refused by their receiver, raised by their sender.

A short message is in the ring, and its send has returned, before its receiver finds that it expects another one. So the
receiver leaves a `Refusal` beside the ring and sets one word of the sender's record. The sender polls only that word:
at the end of every call on the group, and at every check of its peers in a wait.
"""

import threading
from collections import deque
from collections.abc import Sequence

from unisono.errors import MismatchError
from unisono.runtime.call import name_of_dtype
from unisono.runtime.header import DTYPES
from unisono.runtime.message import Arriving, Message
from unisono.transport.layout import REFUSED
from unisono.transport.ring import Refusal, Ring
from unisono.transport.segment import Segment

__all__ = ["RejectedMessages"]

_CODES = {name: code for code, name in enumerate(DTYPES, 1)}
_NAMES = ("", *DTYPES)
_KEPT = 64  # rejections kept until a call raises them


class RejectedMessages:
    """Rejects messages to one rank in one group, and collects rejections of its own; ``out``: its rings to all."""

    def __init__(
        self, segment: Segment, rank: int, global_ranks: Sequence[int], label: str, out: Sequence[Ring]
    ) -> None:
        self._segment, self._rank, self._global_ranks, self._label, self._out = segment, rank, global_ranks, label, out
        self._taking = threading.RLock()
        self._counts = [0] * len(out)
        self._unraised: deque[tuple[int, int, MismatchError]] = deque(maxlen=_KEPT)

    def refuse(self, ring: Ring, arriving: Arriving, message: Message) -> MismatchError:
        """Publishes to the sender that this rank rejects a message in ``ring``; returns the error of its receive."""
        call, source = message.call, message.source
        wanted = _CODES.get(name_of_dtype(call.dtype), 0)
        sent = _CODES.get(arriving.dtype, 0)
        ring.refuse(Refusal(arriving.number, message.tag, arriving.numel, sent, call.numel, wanted))
        self._mark(source, 1)
        return MismatchError(
            f"rank {self._global_ranks[self._rank]} expects {call.describe()} ({call.numel} elements) from rank "
            f"{self._global_ranks[source]}, which sent {arriving.numel} elements of {arriving.dtype} "
            f"(tag {message.tag}, {self._label}); the message was dropped: give send and recv tensors of one size and "
            "dtype"
        )

    def take(self, peer: int = -1, number: int = 0) -> tuple[MismatchError, bool] | None:
        """An error not raised yet, and whether it is of message ``number`` to ``peer``; else the oldest."""
        if self._taking._is_owned():  # type: ignore[attr-defined]  # a handler that interrupts this
            return None
        with self._taking:
            self._mark(self._rank, 0)  # first: a later rejection sets it again
            for rank, ring in enumerate(self._out):
                count, last = ring.refusal()
                if count > self._counts[rank]:
                    error = self._error(rank, last, count - self._counts[rank] - 1)
                    self._unraised.append((rank, last.number, error))
                    self._counts[rank] = count
            if not self._unraised:
                return None
            found = next((each for each in self._unraised if each[:2] == (peer, number)), self._unraised[0])
            self._unraised.remove(found)
            if self._unraised:
                self._mark(self._rank, 1)
            return found[2], found[:2] == (peer, number)

    def _mark(self, rank: int, value: int) -> None:
        """Sets the word of a rank that its queues poll as `refused`: 1 if `take` may return an error."""
        self._segment.longs[self._segment.field(rank, REFUSED)] = value

    def _error(self, peer: int, refusal: Refusal, more: int) -> MismatchError:
        sender, receiver = self._global_ranks[self._rank], self._global_ranks[peer]
        sent = _data(refusal.sent, refusal.sent_dtype)
        wanted = _data(refusal.wanted, refusal.wanted_dtype)
        others = f", and {more} earlier one{'s' * (more > 1)} too" if more else ""
        return MismatchError(
            f"rank {receiver} refused a message of rank {sender}: send of {sent} (message no. {refusal.number} from "
            f"rank {sender} to rank {receiver}, tag {refusal.tag}, {self._label}) met recv of {wanted}{others}; the "
            "message was dropped and the group can still be used: give send and recv tensors of one size and dtype"
        )


def _data(numel: int, code: int) -> str:
    return f"{numel} elements of {_NAMES[code] if code < len(_NAMES) else 'an unknown dtype'}"

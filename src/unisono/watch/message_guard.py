"""The guard of messages on GPUs: what both ends of a message say of it, compared on the host, without a wait.

Between two ranks messages in one direction are numbered, and matched by number alone, as NCCL does. Sender and receiver
publish tag, elements and dtype of each in shared memory when they issue it. Of a message that NCCL carries, or that has
no elements, whoever comes later raises before it launches anything; kernels compare both ends themselves. All else is
found by the watcher's `check`, which looks for lost and late peers too. Over hosts a rank's end goes to the peer's
host, into the memory there, on its way while the message is; so both of two ranks may learn it by their watchers.
An end keeps its last messages only; every one of them carries a checksum over all earlier ones.
"""

import struct
import time
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from unisono.errors import MismatchError
from unisono.runtime.call import name_of_dtype
from unisono.runtime.header import DTYPES
from unisono.runtime.monitor import Monitor
from unisono.runtime.network import Network
from unisono.transport import futex
from unisono.transport.layout import LINE, Layout
from unisono.transport.segment import Segment

__all__ = ["MessageGuard"]

_CODES = {name: code for code, name in enumerate(DTYPES, 1)}
_NAMES = ("a dtype of its own", *DTYPES)
_KEPT, _WORDS = Layout.DEVICE_MESSAGES, Layout.DEVICE_MESSAGE // 8
_END = LINE // 8 + _KEPT * _WORDS  # 64-bit words of an end
_ANY_TAG = (1 << 64) - 1
_FRAME = struct.Struct("<B4Q")  # whether it is sent; number, tag, elements, dtype << 32 | checksum


@dataclass(slots=True)
class _End:
    """This rank's end of one direction: the first words of it and of the peer's; what it has issued, and when."""

    op: str
    peer: int
    mine: int
    theirs: int
    issued: int = 0
    compared: int = 0
    checksum: int = 0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))


@lru_cache(maxsize=1024)
def _published(tag: int, numel: int, dtype: torch.dtype) -> tuple[int, int, bytes]:
    """Tag and dtype of a message as they are published, and the text of which the checksum is taken."""
    tag, code = tag & _ANY_TAG, _CODES.get(name_of_dtype(dtype), 0)
    return tag, code, f"{tag} {numel} {code}".encode()


class MessageGuard:
    """One rank's guard in one group: `issued` is to be called by one thread at a time, `check` by any."""

    def __init__(self, segment: Segment, rank: int, global_ranks: Sequence[int], label: str, monitor: Monitor) -> None:
        self._segment, self._rank, self._global_ranks = segment, rank, list(global_ranks)
        self._label, self._monitor = label, monitor
        self._ends: dict[tuple[str, int], _End] = {}
        if isinstance(network := segment.elsewhere, Network):
            network.deliver_message_end = self._delivered

    def _end(self, op: str, peer: int) -> _End:
        end = self._ends.get((op, peer))
        if end is None:
            end = self._ends[op, peer] = _End(op, peer, *self._places(op, peer))
        return end

    def _places(self, op: str, peer: int) -> tuple[int, int]:
        """The first words of this rank's end of a direction, and of the peer's."""
        sender, receiver = (self._rank, peer) if op == "send" else (peer, self._rank)
        first = (sender * len(self._global_ranks) + receiver) * 2 * _END + self._segment.layout.device_messages // 8
        return (first, first + _END) if op == "send" else (first + _END, first)

    def _publish(self, first: int, number: int, tag: int, numel: int, rest: int) -> None:
        """Lays down a message of an end: this rank's, or one that has come from another host."""
        longs, at = self._segment.longs, first + LINE // 8 + number % _KEPT * _WORDS
        longs[at] = 0
        futex.release()
        longs[at + 1], longs[at + 2], longs[at + 3] = tag, numel, rest
        futex.release()
        longs[at] = longs[first] = number

    def _delivered(self, peer: int, body: bytes) -> None:
        """Takes a message of a peer's end from another host."""
        sends, *words = _FRAME.unpack(body)
        self._publish(self._places("recv" if sends else "send", peer)[1], *words)

    def issued(
        self, op: str, peer: int, tag: int, numel: int, dtype: torch.dtype, compare: bool = True
    ) -> None:  # fmt: skip
        """Publishes a send to, or recv from, a group rank; raises `MismatchError` if the peer's of that number differs.

        ``dtype``, ``numel``: of the tensor; ``tag``: any; ``compare``: False where kernels compare them themselves.
        """
        end, elsewhere = self._end(op, peer), self._segment.elsewhere
        sent, code, text = _published(tag, numel, dtype)
        number, rest = end.issued + 1, code << 32 | end.checksum
        self._publish(end.mine, number, sent, numel, rest)
        if elsewhere is not None and peer in elsewhere:
            elsewhere.publish_message_end(peer, _FRAME.pack(op == "send", number, sent, numel, rest))
        end.times.append(time.monotonic())
        end.issued, end.checksum = number, zlib.crc32(text, end.checksum)
        if compare:
            self._compare(end)

    def compare(self) -> None:
        """Compares all that both ends have issued since; raises `MismatchError`."""
        for end in list(self._ends.values()):
            self._compare(end)

    def _compare(self, end: _End) -> None:
        last = min(end.issued, int(self._segment.longs[end.theirs]))
        for number in range(max(end.compared, last - _KEPT) + 1, last + 1):
            mine, theirs = self._read(end.mine, number), self._read(end.theirs, number)
            if mine is not None and theirs is not None and mine != theirs:
                raise MismatchError(self._words(end, number, mine, theirs))
        end.compared = max(end.compared, last)

    def check(self, timeout: float) -> None:
        """Raises `PeerLostError` for a message whose other end is lost before it was issued, `CollectiveTimeout` for
        one that waits for longer than ``timeout`` seconds, `MismatchError` as `compare`.
        """
        self.compare()
        for end in list(self._ends.values()):
            first = int(self._segment.longs[end.theirs]) + 1
            if first > end.issued:
                continue
            what = f"{end.op} no. {first} {self._direction(end)} of {self._label} on GPUs"
            loss = self._monitor.loss(end.peer)
            if loss and first > int(self._segment.longs[end.theirs]):  # it may have issued it, then left
                raise self._monitor.lost(f"{what} can not end", [loss])
            since = end.times[max(0, len(end.times) - 1 - (end.issued - first))]
            if time.monotonic() - since > timeout:
                other = "recv" if end.op == "send" else "send"
                absent = f"rank {self._global_ranks[end.peer]} has made no such {other}"
                raise self._monitor.late(f"{what} did not end within {timeout:g} s: {absent}", [end.peer])

    def _direction(self, end: _End) -> str:
        return f"{'to' if end.op == 'send' else 'from'} rank {self._global_ranks[end.peer]}"

    def _read(self, end: int, number: int) -> tuple[int, int, int] | None:
        """Tag, elements, dtype and checksum of a message; None if it is not there, or not any more."""
        longs, at = self._segment.longs, end + LINE // 8 + number % _KEPT * _WORDS
        if longs[at] != number:
            return None
        futex.acquire()
        found = (int(longs[at + 1]), int(longs[at + 2]), int(longs[at + 3]))
        futex.acquire()
        return found if longs[at] == number else None

    def _words(self, end: _End, number: int, mine: tuple[int, int, int], theirs: tuple[int, int, int]) -> str:
        sent, received = (mine, theirs) if end.op == "send" else (theirs, mine)
        here, there = self._global_ranks[self._rank], self._global_ranks[end.peer]
        sender, receiver = (here, there) if end.op == "send" else (there, here)
        head = f"message no. {number} from rank {sender} to rank {receiver} of {self._label} on GPUs"
        if (*sent[:2], sent[2] >> 32) == (*received[:2], received[2] >> 32):
            return f"{head}: the ranks disagree about an earlier one; the group can only be destroyed"
        return (
            f"{head}: rank {sender} sends {_facts(sent)}, rank {receiver} expects {_facts(received)}. Give send and "
            "recv tensors of one size and dtype, in one order: between GPUs tags do not reorder messages. The group "
            "can only be destroyed"
        )


def _facts(found: tuple[int, int, int]) -> str:
    tag = found[0] - (1 << 64) if found[0] >> 63 else found[0]
    return f"{found[1]} elements of {_NAMES[found[2] >> 32]} (tag {tag})"

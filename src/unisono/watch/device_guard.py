"""The guard of calls on GPUs: headers compared on the host, without a wait, whatever carries the call out.

Before a call is launched its rank writes the header into shared memory, numbered. For a call that NCCL carries it
compares it with those of the peers that are as far: of two ranks whose calls differ the later one raises before it
launches anything. Kernels compare headers themselves, so their host compares nothing. Others, whose GPUs wait by then,
learn it from their watchers (backend/device_calls.py), which also look for lost and late peers by `check`, and raise at
their next calls. Over hosts a header goes to each other host, into the memory there, on its way
while the call is; nothing waits for it. A rank keeps its last headers only: of ranks further apart than that the
checksum over all earlier headers, which every header carries, is compared at the next number that both have.
"""

import struct
from collections import Counter, deque
from collections.abc import Sequence
from time import monotonic, sleep

from unisono.errors import MismatchError
from unisono.runtime.call import SIGNATURE, Call, Site, call_site, site_text
from unisono.runtime.header import Header, read_header
from unisono.runtime.monitor import Monitor
from unisono.runtime.network import Network
from unisono.transport.board import Board
from unisono.transport.futex import acquire, release
from unisono.transport.layout import DEVICE_ISSUED
from unisono.units import name_ranks
from unisono.watch.device_order import Issued
from unisono.watch.guard import table
from unisono.watch.message_guard import MessageGuard

__all__ = ["DeviceGuard"]

_SUMS = struct.Struct("<Q")
_pack_sum = _SUMS.pack
_LOW = (1 << 32) - 1  # of a number, in the word before its header
_FACTOR = 0x9E3779B1  # of the checksum over all calls: odd, so that nothing earlier is lost from it
_ON_ITS_WAY = 0.05  # s: a header may come after the news that its rank has left, for they come by two ranks


class DeviceGuard:
    """One rank's guard in one group. `issued` and `check` raise; both are to be called by one thread at a time."""

    def __init__(self, board: Board, global_ranks: Sequence[int], label: str, monitor: Monitor) -> None:
        self._board, self._segment, self._rank = board, board.segment, board.rank
        self._global_ranks, self._label, self._monitor = list(global_ranks), label, monitor
        layout = board.segment.layout
        self._depth, self._header = layout.DEVICE_CALLS, layout.header
        self._first_word, self._headers_at = layout.device_numbers // 8, layout.device_headers
        self._first_order = layout.device_orders // 8
        self._peers = [rank for rank in range(board.size) if rank != board.rank]
        self._issued_at = {peer: board.segment.field(peer, DEVICE_ISSUED) for peer in range(board.size)}
        self._compared = dict.fromkeys(self._peers, 0)
        self._places = [(peer, self._issued_at[peer], self._word(peer, 0)) for peer in self._peers]
        self._in_pieces = 0  # the last call of pieces, of which the checksum does not know
        self._mine: deque[tuple[int, Call, bytes, int, float]] = deque(maxlen=self._depth)
        """Number, call, header, checksum, and when it was issued."""
        self._pack = struct.Struct(f"<{self._header - _SUMS.size}sQ").pack_into
        self._sum = 0
        if isinstance(network := board.segment.elsewhere, Network):
            network.deliver_header = self._delivered
        self.messages = MessageGuard(board.segment, board.rank, global_ranks, label, monitor)
        self.number = 0
        """Calls that this rank has issued."""

    def header(self, call: Call) -> bytes:
        """What `issued` publishes of a call."""
        return call.header(self._board.size, self._header - _SUMS.size)

    def launched(self, call: Call, header: bytes, order: int) -> None:
        """Publishes a call's `header`, which kernels compare, on one host: that costs the host no look at the peers.

        ``order``: its `device_order.order_word`; 0 in a graph.
        """
        total = self._sum = self._sum * _FACTOR + call.checksum & _LOW
        number = self.number = self.number + 1
        self._mine.append((number, call, header, total, monotonic()))
        self._publish(self._rank, number, header, total, order)
        if call.sends or call.expects:
            self._in_pieces = number

    def issued(self, call: Call, header: bytes) -> None:
        """Publishes a call's `header` and compares it. Raises `MismatchError` if a peer's of that number differs."""
        self.launched(call, header, 0)
        number, total = self.number, self._sum
        if self._segment.elsewhere is not None:
            self._segment.elsewhere.publish_header(number, header + _pack_sum(total))
        longs, compared, place = self._segment.longs, self._compared, number % self._depth
        for peer, issued_at, words in self._places:
            if longs[words + place] == number & _LOW | total << 32 and compared[peer] >= self._in_pieces:
                compared[peer] = number  # and with it all before, which the checksum is of
            elif longs[issued_at] > compared[peer]:
                self.compare()

    @property
    def last_call(self) -> Call | None:
        """The call that this rank has issued last."""
        return self._mine[-1][1] if self._mine else None

    def compare(self) -> None:
        """Compares all headers that have come since; raises `MismatchError`."""
        longs, compared, mine = self._segment.longs, self._compared, self.number
        for peer, issued_at, _ in self._places:
            last, done = longs[issued_at], compared[peer]
            if last > done < mine:
                last = min(last, mine)
                self._compare(peer, max(done + 1, mine - self._depth + 1), last)
                compared[peer] = last

    def _compare(self, peer: int, first: int, last: int) -> None:
        """Compares the headers of calls ``first`` to ``last`` with those of a peer, as far as both are there still.

        Of two calls with equal numbers and equal checksums only the pieces can differ.
        """
        longs, depth, mine, end = self._segment.longs, self._depth, self._mine, self.number + 1
        for number in range(first, last + 1):
            _, call, header, total, _ = mine[number - end]
            place = self._first_word + number % depth
            if longs[place + peer * depth] == longs[place + self._rank * depth] and not (call.sends or call.expects):
                continue
            theirs, data = self._read(peer, number), header + _pack_sum(total)
            if theirs is not None and theirs != data and not self._agree(peer, data, theirs):
                raise MismatchError(self._words(number, call))

    def check(self, timeout: float) -> None:
        """Raises `PeerLostError` for a lost peer that has not issued what this rank has, `CollectiveTimeout` for a late
        one, `MismatchError` as `compare`.
        """
        self.compare()
        missing = [peer for peer in self._peers if self._published(peer) < self.number]
        if not missing:
            return
        number = min(self._published(peer) for peer in missing) + 1
        found = self._own(max(number, self.number - self._depth + 1))
        if found is None:
            return
        call, since = found[1], found[4]
        what = f"{call.describe(self._global_ranks)}, call no. {number} of {self._label} on GPUs,"
        losses = self._monitor.losses(missing)
        if losses and self._segment.elsewhere is not None:
            sleep(_ON_ITS_WAY)
        missing = [peer for peer in missing if self._published(peer) < number]
        if losses and missing:
            raise self._monitor.lost(f"{what} can not end", losses)
        if missing and monotonic() - since > timeout:
            absent = [self._global_ranks[peer] for peer in missing]
            arrived = ", ".join(str(name) for name in self._global_ranks if name not in absent)
            text = f"{what} did not end within {timeout:g} s: {name_ranks(absent)} missing (arrived: {arrived})"
            raise self._monitor.late(text, missing)

    def published(self) -> tuple[int, ...]:
        """The number of the last call of each rank."""
        return tuple(self._published(rank) for rank in range(self._board.size))

    def orders(self) -> list[Issued]:
        """The last calls that this rank and a peer have both issued, in the orders of the two."""
        found = []
        for number, call, *_ in list(self._mine):
            mine = self._order(self._rank, number)
            for peer in self._peers if mine else ():
                if theirs := self._order(peer, number):
                    words = f"{call.describe(self._global_ranks)}, call no. {number} of {self._label}"
                    found.append(Issued(self, words, self._global_ranks[peer], mine, theirs))
        return found

    def _order(self, rank: int, number: int) -> int:
        """The `order_word` of a rank's call; 0 if it has none, has not come, or is not there any more."""
        word, longs = self._word(rank, number), self._segment.longs
        if longs[word] & _LOW != number & _LOW:
            return 0
        acquire()
        order = int(longs[word - self._first_word + self._first_order])
        acquire()
        return order if longs[word] & _LOW == number & _LOW else 0

    # Headers in shared memory: before each, a word with its number and the checksum of all up to it

    def _publish(self, rank: int, number: int, header: bytes, total: int, order: int = 0) -> None:
        """Lays down the header of a rank's call ``number``, and ``total``, the checksum, behind it."""
        segment, place = self._segment, rank * self._depth + number % self._depth
        longs, word = segment.longs, self._first_word + place
        longs[word] = 0
        release()
        self._pack(segment.raw, self._headers_at + place * self._header, header, total)
        longs[self._first_order + place] = order
        release()
        longs[word] = number & _LOW | total << 32
        longs[self._issued_at[rank]] = number

    def _delivered(self, rank: int, number: int, data: bytes) -> None:
        """Takes a header from another host."""
        self._publish(rank, number, data[: -_SUMS.size], *_SUMS.unpack(data[-_SUMS.size :]))

    def _word(self, rank: int, number: int) -> int:
        """The word of a header."""
        return self._first_word + rank * self._depth + number % self._depth

    def _published(self, rank: int) -> int:
        return int(self._segment.longs[self._issued_at[rank]])

    def _read(self, rank: int, number: int) -> bytes | None:
        """A header; None if it is not there, or not any more."""
        word, longs = self._word(rank, number), self._segment.longs
        if longs[word] & _LOW != number & _LOW:
            return None
        acquire()
        at = self._headers_at + (word - self._first_word) * self._header
        data = self._segment.raw[at : at + self._header]
        acquire()
        return data if longs[word] & _LOW == number & _LOW else None

    def _own(self, number: int) -> tuple[int, Call, bytes, int, float] | None:
        first = self._mine[0][0] if self._mine else 0
        return self._mine[number - first] if self._mine and 0 <= number - first < len(self._mine) else None

    def _agree(self, peer: int, mine: bytes, theirs: bytes) -> bool:
        """True if two headers of one number describe one call, after equal calls."""
        if mine[: SIGNATURE.size] != theirs[: SIGNATURE.size] or mine[-_SUMS.size :] != theirs[-_SUMS.size :]:
            return False
        size = self._board.size
        pieces = struct.Struct(f"<{2 * size}Q")
        here, there = (pieces.unpack_from(data, SIGNATURE.size) for data in (mine, theirs))
        return bool(here[peer] == there[size + self._rank] and there[self._rank] == here[size + peer])

    def _words(self, number: int, call: Call) -> str:
        rows, signatures, site = [], {}, call_site()
        for rank in range(self._board.size):
            data = self._read(rank, number)
            header = read_header(data[: -_SUMS.size]) if data is not None else None
            if data is not None:
                signatures[rank] = data[: SIGNATURE.size]
            mine = rank == self._rank
            words = call.describe(self._global_ranks) if mine else self._described(rank, number, header)
            place: Site | None = site if mine and number == self.number else None
            rows.append((self._global_ranks[rank], words, site_text(place) if place else ""))
        usual, votes = Counter(signatures.values()).most_common(1)[0]
        odd = [r for r, s in signatures.items() if s != usual or 2 * votes <= self._board.size]
        listing = table(rows, [self._global_ranks[rank] for rank in odd])
        earlier = "" if len(set(signatures.values())) > 1 else "\nEarlier calls, or sizes of pieces, differ."
        return (
            f"the ranks of {self._label} disagree about call no. {number} on GPUs:\n{listing}{earlier}\n"
            "All ranks must make the same call; the group can only be destroyed."
        )

    def _described(self, rank: int, number: int, header: Header | None) -> str:
        if header is not None:
            return header.describe(self._global_ranks) + " refused its arguments" * header.refused
        return "(has not come to it)" if self._published(rank) < number else "(has gone on)"

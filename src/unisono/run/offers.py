"""Offers: ranks tell each other where their tensors lie, and all come to one verdict on how a large call goes.

With a large call (see `LARGE`) every rank lays an *offer* beside its header: where its tensor lies in its arena
(transport/arena.py), if it is a shared one, whether it has mapped the arenas it needs, and whether it *hopes* that the
call will go directly, and so has staged nothing for the first meeting. After that meeting all ranks read the same
offers, and so agree without another word:

    STAGED   some tensor is not shared, or some rank has not mapped an arena: the call goes on as it began
    AGAIN    the same, but a rank has hoped in vain: the staged program begins anew, one meeting later
    DIRECT   every rank reads its peers' tensors where they lie (direct.py); a last meeting lets the tensors go
    PUSHED   a broadcast in which the root, too, writes a part of the data into its peers' tensors

A rank maps what its peers offer once it has read of it, so that the first call of shared tensors is a staged one. It
hopes where the last call of its kind went directly. An offer carries the number of its meeting: an older one, left in
its place by a rank that makes none, counts for nothing.
"""

import struct
from collections.abc import Callable, Iterable, Sequence

import torch

from unisono.run.programs import Program
from unisono.transport.arena import place
from unisono.transport.board import Board
from unisono.transport.layout import ABANDONED, COMPLETED, LINE, MIB
from unisono.transport.neighbours import Neighbours
from unisono.watch.account import loss
from unisono.watch.call import SIGNATURE, Call, piece_numel
from unisono.watch.farewell import Loss, lost

__all__ = ["AGAIN", "DIRECT", "LARGE", "PUSHED", "STAGED", "Direct", "Extent", "Offers", "either_way"]

LARGE = MIB
"""Bytes above which a rank's piece is read directly, as much as a staging area holds at most: up to there the data
comes out of the caches in either way. An all_reduce gains wherever it takes two meetings anyway."""
STAGED, AGAIN, DIRECT, PUSHED = range(4)
_READY, _HOPES, _NUMBER = 1, 2, 4  # bits of an offer's first word, the meeting's number above; the second: place + 1

Extent = tuple[int, int]
"""Address and bytes of memory."""
Direct = Callable[["Offers", int, int], Program]
"""A direct program, given the offers, the number of the meeting they were read at, and the verdict."""


class Offers:
    """The offers of one rank in one group, and what it has mapped of its peers."""

    def __init__(self, board: Board, names: Sequence[int], label: str) -> None:
        self._board, self._names, self._label = board, names, label
        self._longs, layout = board.segment.longs, board.segment.layout
        self._places = [
            [(layout.offers + LINE * (half * board.size + rank)) // 8 for rank in range(board.size)] for half in (0, 1)
        ]
        self.neighbours = Neighbours(board.segment, board.rank, board.size)
        self.rank, self.size = board.rank, board.size

    @property
    def meeting(self) -> int:
        """The number of the next meeting."""
        return self._board.meetings

    def lay(self, call: Call, extent: Extent | None, root: int) -> bool:
        """Lays an offer of the memory ``extent`` for the next meeting; whether this rank hopes.

        ``root``: of a broadcast, in which its tensor alone is read; else -1.
        """
        meeting = self._board.meetings
        where = place(*extent) if extent is not None else -1
        ready = self.neighbours.ready(self._needs(root))
        hopes = call.hopes and where >= 0 and (ready if root < 0 else root == self.rank)
        at = self._places[meeting & 1][self.rank]
        self._longs[at] = (meeting + 1) * _NUMBER + hopes * _HOPES + ready * _READY
        self._longs[at + 1] = where + 1
        return hopes

    def verdict(self, call: Call, meeting: int, root: int, large: bool) -> int:
        """What follows from the offers at ``meeting``, which is over; learns what this rank lacks for a better one."""
        longs, stamp = self._longs, meeting + 1
        words = [(longs[at], longs[at + 1]) for at in self._places[meeting & 1]]
        there = [word // _NUMBER == stamp for word, _ in words]
        placed = [here and where > 0 for here, (_, where) in zip(there, words, strict=True)]
        ready = [here and bool(word & _READY) for here, (word, _) in zip(there, words, strict=True)]
        hoped = any(here and word & _HOPES for here, (word, _) in zip(there, words, strict=True))
        possible = large and (all(placed) if root < 0 else placed[root])
        if possible and (root != self.rank or all(placed)):
            self.learn(root)
        able = possible and all(mapped for rank, mapped in enumerate(ready) if rank != root)
        call.hopes = able and (not call.sends or self._long(call))
        if able:
            return PUSHED if root >= 0 and ready[root] and all(placed) else DIRECT
        return AGAIN if hoped else STAGED

    def _long(self, call: Call) -> bool:
        """Whether this rank itself sends or takes a large piece: then nobody takes the call for one of small pieces."""
        pairs = [pair for rank, pair in enumerate(zip(call.sends, call.expects, strict=True)) if rank != self.rank]
        return call.dtype is not None and max(map(piece_numel, sum(pairs, ()))) * call.dtype.itemsize > LARGE

    def learn(self, root: int) -> None:
        """Maps the arenas that this rank needs, as far as they are offered."""
        self.neighbours.learn(self._needs(root))

    def _needs(self, root: int) -> Iterable[int]:
        """Whose arenas this rank has to map."""
        return range(self.size) if root < 0 or root == self.rank else (root,)

    def peer(self, rank: int, meeting: int, start: int, nbytes: int) -> torch.Tensor:
        """Bytes of the tensor that ``rank`` offered at ``meeting``, from ``start`` on: flat, uint8."""
        where = self._longs[self._places[meeting & 1][rank] + 1] - 1
        return self.neighbours.view(rank, where + start, nbytes)

    def sent(self, rank: int, meeting: int) -> list[int]:
        """Elements that ``rank`` sends to each rank in the call whose first meeting was ``meeting``."""
        start, _ = self._board.header_span(meeting & 1, rank)
        numbers = struct.unpack_from(f"<{self.size}Q", self._board.segment.raw, start + SIGNATURE.size)
        return [piece_numel(number) for number in numbers]

    def confirm(self, call: Call) -> None:
        """Raises `PeerLostError` if a peer has given up the call that has just been carried out directly.

        It has come to the last meeting, but its tensor was its user's again before all had read it.
        """
        longs, field = self._longs, self._board.segment.field
        number = longs[field(self.rank, COMPLETED)] + 1
        gone = [rank for rank in range(self.size) if longs[field(rank, ABANDONED)] == number]
        if gone:
            what = f"{call.describe(self._names)}, call no. {number} of {self._label}, has no result to be trusted"
            unknown = "gave the call up while its tensor was in use"
            raise lost(
                what,
                [
                    loss(self._board.segment, r, self._names[r]) or Loss(f"rank {self._names[r]} {unknown}")
                    for r in gone
                ],
            )


def either_way(
    offers: Offers,
    call: Call,
    extent: Extent | None,
    staged: Callable[[], Program],
    direct: Direct,
    large: Callable[[], bool],
    root: int = -1,
) -> Program:
    """The program of a call that may go directly: ``extent`` is what this rank offers, None if it has nothing to offer.

    ``large`` is asked after the first meeting, when the headers have been compared.
    """
    meeting = offers.meeting
    hopes = offers.lay(call, extent, root)
    program = staged()
    if not hopes:
        next(program)
    yield
    verdict = offers.verdict(call, meeting, root, large())
    if verdict in (DIRECT, PUSHED):
        yield from direct(offers, meeting, verdict)
        offers.confirm(call)
    else:
        yield from staged() if verdict == AGAIN else program

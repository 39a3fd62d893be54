"""Direct access to the tensors of peers, outside of the loops: mapping their memory, and what a lost peer means for it.

How ranks agree on it is told in agreement.py.
"""

from collections.abc import Iterable, Sequence

from unisono.transport.board import Board
from unisono.transport.layout import ABANDONED, COMPLETED
from unisono.transport.neighbours import Neighbours
from unisono.watch.account import loss
from unisono.watch.call import Call
from unisono.watch.farewell import Loss, lost

__all__ = ["ZeroCopy"]


class ZeroCopy:
    """What one rank has mapped of its peers in one group."""

    def __init__(self, board: Board, names: Sequence[int], label: str) -> None:
        self._board, self._names, self._label = board, names, label
        self.neighbours = Neighbours(board.segment, board.rank, board.size)

    def map_peers(self, root: int) -> None:
        """Maps the memory of the peers that this rank reads: the root's, or everybody's (root -1, or this rank)."""
        everybody = root < 0 or root == self._board.rank
        ranks: Iterable[int] = range(self._board.size) if everybody else (root,)
        self.neighbours.learn(ranks)

    def check_abandoned(self, call: Call) -> None:
        """Raises `PeerLostError` if a peer has given up the call that has just been carried out directly.

        It has come to the last meeting, but its tensor was its user's again before all had read it.
        """
        segment, names = self._board.segment, self._names
        longs, field = segment.longs, segment.field
        number = longs[field(self._board.rank, COMPLETED)] + 1
        gone = [rank for rank in range(self._board.size) if longs[field(rank, ABANDONED)] == number]
        if gone:
            what = f"{call.describe(names)}, call no. {number} of {self._label}, has no result to be trusted"
            unknown = "gave the call up while its tensor was in use"
            raise lost(what, [loss(segment, r, names[r]) or Loss(f"rank {names[r]} {unknown}") for r in gone])

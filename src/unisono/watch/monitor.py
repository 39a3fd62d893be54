"""The monitor of a group: flight records, guard, status page, deadlock search and exit notes, for its two queues."""

from collections.abc import Callable, Sequence
from typing import Any

from unisono.errors import PeerLostError, UnisonoError
from unisono.runtime.call import Call, Site, call_site, site_text
from unisono.runtime.monitor import Loss, Wait
from unisono.runtime.queue import any_listeners
from unisono.runtime.task import first_line
from unisono.transport.board import Board
from unisono.transport.layout import COMPLETED, FAREWELL, GAVE_UP, ISSUED, STATE, TROUBLE
from unisono.transport.process import alive, stopped
from unisono.watch import peer_state
from unisono.watch.deadlock import LongWait
from unisono.watch.exit_notes import exit_note, lost
from unisono.watch.flight import CollectiveRecord, MessageRecord, save_after
from unisono.watch.guard import compare_words, disagreement
from unisono.watch.page import watch

__all__ = ["GroupMonitor"]

_PATIENCE = 0.3  # s: how long peers are asked where they are, or for their flight records
_WORDS = 800  # characters of an error that others may quote


class GroupMonitor:
    """What `unisono.runtime.monitor.Monitor` asks, for one rank of a group of global ranks ``names``."""

    def __init__(self, board: Board, names: Sequence[int], label: str) -> None:
        self._board, self._segment, self._rank = board, board.segment, board.rank
        self._names, self._label, self._watch = names, label, watch()
        nonce = board.segment.nonce
        self.calls = CollectiveRecord(label, names, board.rank, _counts(board), nonce)
        self.messages = MessageRecord(label, names, board.rank, nonce)
        self.books = self.calls.books
        self.issued, self.completed, self.moved = self.messages.issue, self.messages.end, self.messages.moved

    def located(self, ticket: Any, site: Site) -> None:
        """Adds where a call was made, which is found out only if it takes long or goes wrong."""
        if isinstance(ticket, int):
            self.calls.locate(ticket, site)
        else:
            ticket.site = site

    def met(
        self, call: Call, number: int, site: Site | None, headers: bytes, meet: Callable[[], bool]
    ) -> tuple[str, bool]:
        """The guard. Ranks whose calls differ tell each other in words; see `Monitor`."""
        found = disagreement(call, headers, self._board.size, self._names)
        if found is None:
            return "", True
        place = site or call_site()
        self.calls.locate(number, place)
        return compare_words(self._board, self._names, self._label, number, call, place, found, meet)

    def failed(self, error: BaseException, ticket: Any = None) -> None:
        """Writes the flight record and asks the others for theirs, if that is wanted and the error serious."""
        if ticket is not None:
            self.messages.fail(ticket)
        save_after(error, self._ask_for_records)
        if ticket is not None:  # a rank that goes on may keep its peers waiting over this: then they can say it
            words = f"{type(error).__name__}: {' '.join(str(error).split())}"
            self._segment.say(self._rank, TROUBLE, words[:_WORDS])

    def _ask_for_records(self, folder: str) -> None:
        peers = [self._segment.identity(peer) for peer in range(self._board.size) if peer != self._rank]
        self._watch.records_of([peer for peer in peers if alive(peer) and not stopped(peer)], folder, _PATIENCE)

    def gave_up(self, error: UnisonoError) -> None:
        """Leaves an exit note: no call of this rank can follow in the group."""
        self._segment.say(self._rank, FAREWELL, exit_note(first_line(error), error.cause))
        self._segment.longs[self._segment.field(self._rank, STATE)] = GAVE_UP

    def waits(self, text: Callable[[], str], site: Site) -> Wait:
        """Publishes a wait that has become long, and looks for deadlocks."""
        me, at = f"rank {self._names[self._rank]} (pid {self._watch.me.pid})", site_text(site)
        return LongWait(self._watch, lambda: f"{me}: {text()}, at {at}", any_listeners)

    def loss(self, rank: int) -> Loss | None:
        """Why ``rank`` will never come; None if it may still."""
        return peer_state.loss(self._segment, rank, self._names[rank])

    def losses(self, missing: Sequence[int]) -> list[Loss]:
        """Why a call that needs all ranks will never end."""
        return peer_state.losses(self._segment, missing, self._names)

    def lost(self, what: str, losses: Sequence[Loss]) -> PeerLostError:
        """The error of a call that can not end."""
        return lost(what, losses)

    def lateness(self, ranks: Sequence[int]) -> str:
        """A line per rank: what it completed last in this group, when, and what it does now."""
        return peer_state.lateness(self._segment, self._watch, ranks, self._names, _PATIENCE)


def _counts(board: Board) -> Callable[[], tuple[int, int, int]]:
    """Tells how many calls this rank has issued and completed, and how many any rank has issued at most."""
    longs, everybody = board.segment.longs, [board.segment.field(rank, ISSUED) for rank in range(board.size)]
    issued, completed = everybody[board.rank], board.segment.field(board.rank, COMPLETED)
    return lambda: (longs[issued], longs[completed], max(longs[place] for place in everybody))

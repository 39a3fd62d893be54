"""The monitor of a group: flight records, guard, status page, deadlock search and exit notes, for its two queues."""

import json
import socket
from collections.abc import Callable, Sequence
from typing import Any

from unisono.errors import UnisonoError, first_line
from unisono.runtime.call import Call, Site, call_site, site_text
from unisono.runtime.monitor import Wait
from unisono.runtime.network import Network
from unisono.runtime.queue import any_listeners
from unisono.transport.board import Board
from unisono.transport.layout import COMPLETED, EXIT_NOTE, GAVE_UP, ISSUED, MESSAGE_ERROR, STATE
from unisono.transport.process import alive, stopped
from unisono.watch import remote_page
from unisono.watch.clocks import serve_clock
from unisono.watch.deadlock import LongWait
from unisono.watch.exit_notes import exit_note, lost
from unisono.watch.flight import CollectiveRecord, MessageRecord, save_after
from unisono.watch.guard import compare_words, disagreement
from unisono.watch.peer_state import PeerState
from unisono.watch.status_page import own_page

__all__ = ["GroupMonitor"]

_PATIENCE = 0.3  # s of waiting for the flight records of peers
_WORDS = 800  # characters of an error that others may quote


class GroupMonitor:
    """The `unisono.runtime.monitor.Monitor` of one rank of the group of ``global_ranks``."""

    def __init__(self, board: Board, global_ranks: Sequence[int], label: str) -> None:
        self._board, self._segment, self._rank = board, board.segment, board.rank
        self._global_ranks, self._label, self._own_page = global_ranks, label, own_page()
        peers = self._peers = PeerState(board.segment, global_ranks)
        self.loss, self.losses, self.late, self.lost = peers.loss, peers.losses, peers.late, lost
        self._network: Network | None = None
        nonce = board.segment.nonce
        self.calls = CollectiveRecord(label, global_ranks, board.rank, _counts(board), nonce)
        self.messages = MessageRecord(label, global_ranks, board.rank, nonce)
        self.call_log = self.calls.call_log
        self.issued, self.completed, self.moved = self.messages.issue, self.messages.end, self.messages.moved

    def located(self, call_id: Any, site: Site) -> None:
        """Records the call site, which is looked up only if a call takes long or fails."""
        if isinstance(call_id, int):
            self.calls.locate(call_id, site)
        else:
            call_id.site = site

    def met(
        self, call: Call, number: int, site: Site | None, headers: bytes, meet: Callable[[], bool]
    ) -> tuple[str, bool]:
        """Runs the guard. Ranks whose calls differ publish theirs in words; see `Monitor`."""
        found = disagreement(call, headers, self._board.size, self._global_ranks)
        if found is None:
            return "", True
        place = site or call_site()
        self.calls.locate(number, place)
        return compare_words(self._board, self._peers, self._label, number, call, place, found, meet)

    def failed(self, error: BaseException, call_id: Any = None) -> None:
        """Writes the flight record and asks peers for theirs, if that is configured and the error serious."""
        if call_id is not None:
            self.messages.fail(call_id)
        save_after(error, self._ask_for_records)
        if call_id is not None:  # a rank that goes on may keep its peers waiting over this: their errors quote it
            words = f"{type(error).__name__}: {' '.join(str(error).split())}"
            self._segment.set_text(self._rank, MESSAGE_ERROR, words[:_WORDS])

    def _ask_for_records(self, folder: str) -> None:
        peers = [self._segment.identity(peer) for peer in range(self._board.size) if peer != self._rank]
        self._own_page.records_of([peer for peer in peers if alive(peer) and not stopped(peer)], folder, _PATIENCE)
        if self._network is not None:
            self._network.questions.ask_all(self._network.hosts.remote, "record", folder.encode(), _PATIENCE)

    def gave_up(self, error: UnisonoError) -> None:
        """Publishes an exit note: no call of this rank can follow in the group."""
        note = exit_note(first_line(error), error.cause)
        self._segment.set_text(self._rank, EXIT_NOTE, note)
        self._segment.longs[self._segment.field(self._rank, STATE)] = GAVE_UP
        if self._segment.elsewhere is not None:
            self._segment.elsewhere.publish(GAVE_UP, note)

    def waits(self, text: Callable[[], str], site: Site) -> Wait:
        """Publishes a long wait, and checks for deadlocks."""
        where = f" on {socket.gethostname()}" if remote_page.over_hosts() else ""
        me = f"rank {self._global_ranks[self._rank]} (pid {self._own_page.me.pid}{where})"
        at = site_text(site)
        return LongWait(self._own_page, lambda: f"{me}: {text()}, at {at}", any_listeners)

    def serve(self, network: Network) -> None:
        """Answers what ranks of other hosts ask."""
        self._network = network
        remote_page.serve(network)
        serve_clock(network)
        network.questions.answers["activity"] = self._activities

    def _activities(self, ranks: bytes) -> bytes:
        """The lateness of ranks of this host."""
        here = [rank for rank in json.loads(ranks) if rank not in (self._segment.elsewhere or ())]
        return json.dumps(self._peers.lateness(here)).encode()


def _counts(board: Board) -> Callable[[], tuple[int, int, int]]:
    """A function that returns the calls issued and completed by this rank, and the most that any has issued."""
    longs, issued_at = board.segment.longs, [board.segment.field(rank, ISSUED) for rank in range(board.size)]
    issued, completed = issued_at[board.rank], board.segment.field(board.rank, COMPLETED)
    return lambda: (longs[issued], longs[completed], max(longs[place] for place in issued_at))

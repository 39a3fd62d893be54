"""The queue of messages: send and recv between two ranks, matched by source and tag, in the order they were posted.

Messages to one peer leave in order; messages from one peer arrive in order and match the oldest receive that names
their source (or any) and their tag. A message without a receive stays in the ring, unless a receive with another tag
waits behind it: then it is *unexpected*, and copied to this rank's own memory. A send is complete when its last byte is
in the ring, so that small messages need no receiver; longer ones flow as the receiver takes them.

A message on an ordinary tensor goes in one run of a loop (message_interpreter.py) if its peer is there. A message in
the background goes as far as it can when it is issued; the next wait progresses all that are under way together, in
both directions at once.
"""

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from unisono.errors import CollectiveTimeout, MismatchError, PeerLostError, UnisonoError
from unisono.runtime.call import Site, name_of_dtype
from unisono.runtime.message import Arriving, Message, PreparedMessage, read_head
from unisono.runtime.message_control import MessageControl
from unisono.runtime.message_words import NOTHING_MOVED, OTHER
from unisono.runtime.monitor import Loss, Monitor
from unisono.runtime.pending_messages import Job, PendingMessages, listed
from unisono.runtime.queue import CallQueue
from unisono.runtime.rejected_messages import RejectedMessages
from unisono.runtime.task import MIN_PATIENCE_NS, Task, interruption, patience_for
from unisono.transport.futex import SPIN_NS
from unisono.transport.inference import outside_inference
from unisono.transport.process import Identity
from unisono.transport.ring import Ring
from unisono.transport.segment import Segment

__all__ = ["MessageQueue"]

_SLEEP = 0.05  # s: how long a receive sleeps before it is queued, where all is looked after


class MessageQueue(CallQueue):
    """All messages of one rank in one group."""

    def __init__(self, segment: Segment, rank: int, global_ranks: Sequence[int], label: str, monitor: Monitor) -> None:
        super().__init__(segment, rank, global_ranks, label, monitor)
        pending = self._pending = PendingMessages(segment, rank)
        self._out, self._in, self._bells = pending.outgoing, pending.inboxes, pending.bells
        self._sends, self._posted = pending.sends, pending.posted
        self.rejected = RejectedMessages(segment, rank, global_ranks, label, self._out)
        self._control = MessageControl(segment, rank)
        self._seen = 0  # the count of this rank's bell before the last poll of the rings
        self._broken_off = False  # in the midst of a step: what a loop has moved may not be counted

    def busy(self) -> bool:
        """True if any message is under way."""
        return self._pending.busy()

    def run_now(
        self, prepared: PreparedMessage, peer: int, tensor: torch.Tensor, timeout: float, background: bool
    ) -> Message | int:
        """Moves a message to or from ``peer`` in one run of a loop, if the queue is free and the peer is there.

        Returns its number among those to ``peer``, 0 for a receive. If other messages are ahead, or not all of it has
        moved, it returns the message: under way in the ``background``, or done.
        """
        if self.entered():
            self._refuse_reentry(prepared.call)
        found = self._run(prepared, peer, tensor, timeout, background)
        if type(found) is int and found < 0 and not prepared.sends and timeout > 2 * _SLEEP:
            end = time.monotonic() + _SLEEP
            while type(found) is int and found < 0 and (left := end - time.monotonic()) > 0:
                self._control.sleep_on_bell(~found, int(1e9 * left))
                found = self._run(prepared, peer, tensor, timeout, background)
        if type(found) is int and found >= 0:
            return found
        if isinstance(found, Message):
            self.leave(found, background)
        else:
            found = Message(prepared, peer, tensor, [tensor], timeout)
            self.submit(found, background)
        return found

    def _run(
        self, prepared: PreparedMessage, peer: int, tensor: torch.Tensor, timeout: float, background: bool
    ) -> Message | int | None:
        """Runs a loop for a message until its patience ends. Returns what `run_now` does, or None if others are ahead;
        if nothing has moved, ``~bell``, the count of this rank's bell before the last poll.
        """
        sends, inbox, out = prepared.sends, self._in[peer], self._out[peer]
        self._pending.reach((peer,))
        with self._lock:
            ahead = peer in self._sends if sends else self._sends or self._posted or inbox.occupied
            if ahead or self.failed is not None:
                return None
            try:
                began = time.monotonic_ns()
                patience = 0 if background else SPIN_NS
                moved = self._control.progress(prepared, peer, tensor.data_ptr(), patience)
                if moved == NOTHING_MOVED and background and not sends:
                    moved = self._soon(prepared, peer, tensor.data_ptr())
                    if moved == NOTHING_MOVED:
                        message = Message(prepared, peer, tensor, [tensor], timeout)
                        self._enqueue(message)
                        return message
                if moved < 0:
                    return ~self._control.bell_seen if moved == NOTHING_MOVED else None
                if sends:
                    out.heads += 1
                if moved == prepared.nbytes:
                    self.monitor.moved(prepared.call, peer, prepared.tag, began)
                    return out.heads if sends else 0
                return self._rest(prepared, peer, tensor, timeout, moved)
            except BaseException as error:
                self._abort(interruption(error))
                raise

    def _soon(self, prepared: PreparedMessage, peer: int, address: int) -> int:
        """Polls for a message in the background, about as long as to queue it takes: not while its peer waits too."""
        moved, ring, out, left = NOTHING_MOVED, self._in[peer].ring, self._out[peer], MIN_PATIENCE_NS
        while moved == NOTHING_MOVED and left > 0 and not out.starved():
            patience = MIN_PATIENCE_NS // 5 if ring.idle() else patience_for(prepared.call)
            moved = self._control.progress(prepared, peer, address, patience)
            left -= patience
        return moved

    def _rest(self, prepared: PreparedMessage, peer: int, tensor: torch.Tensor, timeout: float, moved: int) -> Message:
        """A message of which ``moved`` bytes are through, as one under way."""
        message = Message(prepared, peer, tensor, [tensor], timeout)
        message.started, message.moved = True, moved
        message.call_id = self.monitor.issued(prepared.call, peer, prepared.tag)
        if message.sends:
            message.number = self._out[peer].heads
            self._pending.send(message, peer)
        else:
            message.wanted = True  # by the loop
            self._begin(message, peer, moved)
        return message

    def _begin(self, message: Message, peer: int, moved: int) -> Arriving:
        """A loop has opened the message from ``peer`` that a receive waits for, and taken ``moved`` bytes of it."""
        inbox, call, nbytes = self._in[peer], message.call, message.prepared.nbytes
        number, dtype = inbox.ring.opened(0), name_of_dtype(call.dtype)
        arriving = inbox.current = Arriving(message.tag, nbytes, call.numel, dtype, number, message, moved=moved)
        return arriving

    # Under way

    def _enqueue(self, task: Task) -> None:
        assert isinstance(task, Message)
        task.call_id = self.monitor.issued(task.call, task.peer, task.tag)
        self._pending.reach(self._pending.sources(task))
        if task.sends:
            assert task.peer is not None
            self._out[task.peer].post()
            self._pending.send(task, task.peer)
        elif not any(self._take_unexpected(peer, task) for peer in self._pending.sources(task)):
            self._posted.append(task)
            self._pending.want(task, 1)

    def _locate(self, task: Task, site: Site) -> None:
        assert isinstance(task, Message)
        self.monitor.located(task.call_id, site)

    def _under_way(self) -> list[Message]:
        return self._pending.all()

    @outside_inference
    def _progress(self, spin: bool) -> None:
        patience, repeat = SPIN_NS if spin else 0, True
        while repeat and (jobs := self._pending.jobs(self._place, self._place_of)):
            results, self._seen = self._control.progress_all([job for _, job in jobs], patience)
            repeat = False
            for (each, _), job in zip(jobs, results, strict=True):
                ended = self._moved(each, job)
                repeat = repeat or (ended and not spin)  # a waiter first checks whether its own message has ended

    def _place(self, message: Message) -> int:
        """The address of a message's bytes; -1, and the message has failed, if its tensor has lost them."""
        try:
            return message.address()
        except UnisonoError as error:
            self._fail(message, error)
            return -1

    def _place_of(self, arriving: Arriving, ring: Ring) -> int:
        """The address to which an arriving message is copied; 0 to drop it."""
        if arriving.message is not None:
            if (at := self._place(arriving.message)) >= 0:
                return at
            self._drain(arriving, ring)
        return int(arriving.unexpected.ctypes.data) if arriving.unexpected is not None else 0

    def _moved(self, each: Message | Arriving, job: Job) -> bool:
        """Applies the result of a loop to a message; returns True if one has ended, or begun for another receive."""
        sends, peer, _, _, nbytes, moved, begun = job
        if isinstance(each, Arriving):
            each.moved = moved
        elif sends:
            each.moved = moved
            if begun and not each.started:
                self._out[peer].heads += 1
                each.started, each.number = True, self._out[peer].heads
        elif begun == OTHER:
            self._open(peer)
            return True
        elif begun:
            self._posted.remove(each)
            each = self._begin(each, peer, moved)
        if begun != 1 or moved != nbytes:
            return False
        if isinstance(each, Arriving):
            self._arrived(peer, each)
        else:
            self._pending.sent(each)
            self._end_message(each)
        return True

    def _open(self, peer: int) -> None:
        """Reads the next head from ``peer`` and matches the message, if a receive still waits for one."""
        inbox, wanting = self._in[peer], [m for m in self._posted if m.peer in (None, peer)]
        if not wanting:  # one from another rank has met the receive
            return
        tag, nbytes, numel, dtype = read_head(inbox.ring.open())
        self._bells[peer].add()
        arriving = inbox.current = Arriving(tag, nbytes, numel, dtype, inbox.ring.opened())
        message = next((m for m in wanting if m.tag == tag), None)
        if message is None:
            arriving.unexpected = np.empty(nbytes, np.uint8)
        else:
            self._posted.remove(message)
            message.source = peer
            if self._match(arriving, message):
                arriving.message = message
            else:
                self._drain(arriving, inbox.ring)
        if nbytes == 0:
            self._arrived(peer, arriving)

    def _arrived(self, peer: int, arriving: Arriving) -> None:
        """All of a message has been taken."""
        inbox = self._in[peer]
        inbox.current = None
        if arriving.refused:
            inbox.ring.want(-1)
        if arriving.message is not None:
            self._end_message(arriving.message)
        elif arriving.unexpected is not None:
            inbox.unexpected.append(arriving)
            for message in self._posted:  # a receive may have been posted while its message arrived
                if message.peer in (None, peer) and self._take_unexpected(peer, message):
                    self._posted.remove(message)
                    return

    def _take_unexpected(self, peer: int, task: Message) -> bool:
        """Completes ``task`` with an unexpected message, if one matches."""
        for waiting in self._in[peer].unexpected:
            if waiting.tag == task.tag:
                self._in[peer].unexpected.remove(waiting)
                task.source = peer
                if self._match(waiting, task):
                    self._end_message(task, waiting.unexpected)
                return True
        return False

    def _drain(self, arriving: Arriving, ring: Ring) -> None:
        """Receives and drops a rejected message: its sender waits for that."""
        arriving.refused = True
        ring.want(1)
        self._worker.wake()

    def _match(self, arriving: Arriving, message: Message) -> bool:
        """True if sender and receiver agree; if not, the receive ends with the reason and the data is dropped."""
        call = message.call
        if arriving.numel == call.numel and arriving.dtype == name_of_dtype(call.dtype):
            return True
        assert self.rejected is not None
        error = self.rejected.refuse(self._in[message.source].ring, arriving, message)
        self._bells[message.source].add()
        self.monitor.completed(message.call_id, message.source)
        self.monitor.failed(error)
        self._end(message, error)
        return False

    @outside_inference
    def _end_message(self, message: Message, unexpected: Any = None) -> None:
        """All of a message is through; a received one lies in its tensor, or ``unexpected``."""
        error: UnisonoError | None = None
        try:
            if unexpected is not None:
                ctypes.memmove(message.address(), unexpected.ctypes.data, unexpected.nbytes)
            if message.after is not None:
                message.after()
        except UnisonoError as reason:
            error = reason
        except (RuntimeError, MemoryError) as reason:
            error = UnisonoError(f"a message could not be delivered: {type(reason).__name__}: {reason}")
        message.after = None
        self.monitor.completed(message.call_id, message.source)
        self._end(message, error)

    def _end(self, task: Task, error: BaseException | None = None) -> None:
        assert isinstance(task, Message)
        if task.wanted:
            self._pending.want(task, -1)
        super()._end(task, error)

    def _sleep(self, seconds: float) -> None:
        self._bells[self._rank].sleep(self._seen, seconds)

    # What does not end well

    def _check_peers(self) -> None:
        losses = {id(message): self._losses(message) for message in self._under_way()}
        if any(losses.values()):
            self._progress(spin=False)  # what a peer sent before it left is there by now, and counts
        for peer, inbox in enumerate(self._in):
            if inbox.current and inbox.current.refused and self.monitor.loss(peer):
                inbox.current.refused = False  # the rest will never come
        for message in self._under_way():
            if gone := losses.get(id(message)):
                self._fail_lost_peer(message, self.monitor.lost(self.explain(message, "can not end"), gone))
            elif words := message.overdue():
                self._fail(message, self._late(message, words))

    def _losses(self, message: Message) -> list[Loss]:
        """Why the peer will never do its part, or nothing; for any source, if all the others are gone."""
        found = [self.monitor.loss(peer) for peer in self._pending.peers(message)]
        return [each for each in found if each] if all(found) else []

    def _needs(self, task: Task) -> list[Identity]:
        assert isinstance(task, Message)
        peer = self._pending.needed(task)
        return [] if peer is None else [self._segment.process(peer)]

    def _rejected_error(self, task: Task | None, outcome: str) -> UnisonoError | None:
        if not isinstance(task, Message) or task.peer is None or self.rejected is None:
            return super()._rejected_error(task, outcome)
        error, own = self.rejected.take(task.peer, task.number) or (None, False)
        if own:
            task.error = error
        return error if own or error is None else MismatchError(f"{error}. {outcome}")

    def _on_rejected(self, task: Task) -> None:
        """A message of which nothing has moved yet is withdrawn; any other is waited for."""
        assert isinstance(task, Message)
        if self._pending.unmoved(task):
            outcome = f"The {task.call.op} that raises this was withdrawn: it has moved nothing."
            if error := self._rejected_error(task, outcome):
                self._fail(task, error)

    def _on_interrupt(self, task: Task, error: UnisonoError, held: bool) -> None:
        """Fails a message: torch's send and recv wait for a Work of their own, so no other wait follows."""
        self._fail(task, error)

    def explain(self, task: Task, what: str, placed: bool = True) -> str:
        """A message that did not get through; see `CallQueue`."""
        assert isinstance(task, Message)
        pending, place = self._pending, task.place() if placed else ""
        peer = "any rank" if task.peer is None else f"rank {self._global_ranks[task.peer]}"
        others = [] if task.sends else pending.unclaimed(pending.peers(task), self._global_ranks, in_ring=False)
        there = f", while {listed(others)} {'are' if len(others) > 1 else 'is'} there" if others else ""
        return (
            f"{task.call.describe()} {'to' if task.sends else 'from'} {peer} (tag {task.tag}, {self._label}){place} "
            f"{what}: {pending.progress(task)} of {task.prepared.nbytes} bytes moved{there}"
        )

    def _late(self, task: Task, what: str) -> CollectiveTimeout:
        assert isinstance(task, Message)
        return self.monitor.late(self.explain(task, what), self._pending.peers(task))

    def lost(self) -> list[str]:
        """Words on messages to this rank that it has never received, and on its own to ranks that have left before.

        Reported once: by the rank that leaves last. After a step that was broken off nothing tells where a head lies.
        """
        with self._lock:
            return [] if self._broken_off else self._pending.lost(self._global_ranks, self._label)

    def _fail(self, task: Task, error: UnisonoError) -> None:
        assert isinstance(task, Message)
        lost = isinstance(error, PeerLostError)
        partly_sent = self._pending.remove(task, keep=self.failed is None and not lost) and not lost
        self.monitor.failed(error, task.call_id)
        self._end(task, error)
        if partly_sent:  # half a message lies in the ring: nothing can follow it, here or there
            super()._abort(error)

    def _abort(self, error: UnisonoError) -> None:
        self._broken_off = True
        super()._abort(error)

    def _fail_all(self, error: UnisonoError) -> None:
        for message in self._under_way():
            self._fail(message, error)

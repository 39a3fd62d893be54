"""The lane of messages: send and recv between two ranks, matched by source and tag, in the order they were posted.

Messages to one peer leave in order; messages from one peer arrive in order and meet the oldest receive that names
their source (or any) and their tag. A message nobody has asked for stays in the ring, unless a receive with another
tag waits behind it: then it is set aside in this rank's own memory. A send is done when its last byte is in the ring,
so that small messages need no receiver; longer ones flow as the receiver takes them.
"""

import time
from collections import deque
from collections.abc import Sequence

import torch

from unisono.errors import CollectiveTimeout, MismatchError, PeerLostError, UnisonoError
from unisono.runtime.flow import copy, push, take
from unisono.runtime.lane import Lane
from unisono.runtime.message import Arriving, Inbox, Message, read_head
from unisono.runtime.refusals import Refusals, refusal
from unisono.runtime.task import Task
from unisono.transport import futex
from unisono.transport.inference import outside_inference
from unisono.transport.process import Identity
from unisono.transport.ring import UNIT, Ring
from unisono.transport.segment import LEFT, TROUBLE, Segment
from unisono.watch.account import lateness, loss
from unisono.watch.call import name_of_dtype
from unisono.watch.farewell import Loss, lost
from unisono.watch.flight import MessageRecord
from unisono.watch.site import Site

__all__ = ["Message", "PointToPointLane"]

_WORDS = 800  # characters of an error that others may quote
_NAMED = 3  # messages that nobody receives, as errors name them
_SPINS, _YIELDS = 20, 100


class PointToPointLane(Lane):
    """All messages of one rank in one group."""

    def __init__(self, segment: Segment, rank: int, names: Sequence[int], label: str) -> None:
        super().__init__(segment, rank, names, label)
        size, layout = segment.layout.world_size, segment.layout
        self._out = [Ring(segment, rank, peer) for peer in range(size)]
        self._in = [Inbox(Ring(segment, peer, rank)) for peer in range(size)]
        self._bells = [
            futex.Counter(segment.words, (layout.bells + 64 * peer) // 4, segment.address) for peer in range(size)
        ]
        self._sends: list[deque[Message]] = [deque() for _ in range(size)]
        self._posted: list[Message] = []
        self._flight = MessageRecord(label, names, rank, segment.nonce)
        self.refusals = Refusals(segment, rank, names, label, self._out)
        self._heard = 0  # this rank's bell as it was before the last look into the rings

    def busy(self) -> bool:
        """Whether any message is under way."""
        return bool(self._posted) or any(self._sends) or any(i.current and i.current.taken for i in self._in)

    def _enqueue(self, task: Task) -> None:
        assert isinstance(task, Message)
        task.note = self._flight.issue(task.call, task.peer, task.tag)
        if task.call.op == "send":
            assert task.peer is not None
            self._out[task.peer].post()
            self._sends[task.peer].append(task)
            return
        for peer in range(len(self._in)) if task.peer is None else (task.peer,):
            if self._taken_aside(peer, task):
                return
        self._posted.append(task)
        self._want(task, 1)

    def _want(self, message: Message, change: int) -> None:
        """Tells the sources that could serve a receive that it is there (until it has ended), or gone."""
        message.wanted = change > 0
        for peer in range(len(self._in)) if message.peer is None else (message.peer,):
            self._in[peer].ring.want(change)

    def _locate(self, task: Task, site: Site) -> None:
        assert isinstance(task, Message)
        task.note.site = site

    def _under_way(self) -> Sequence[Task]:
        return self._messages()

    @outside_inference
    def _carry(self, linger: bool) -> None:
        limit = time.perf_counter() + futex.LINGER if linger else 0.0
        for attempt in range(_SPINS + _YIELDS if linger else 1):
            self._heard = self._bells[self._rank].value()
            for peer, queue in enumerate(self._sends):
                while queue and self._push(queue[0], peer):
                    self._end_message(queue.popleft())
            for peer in self._wanted():
                self._pull(peer)
            if not linger or not self.busy():
                return
            if attempt >= _SPINS and (time.perf_counter() > limit or not futex.give_way()):
                return

    def _push(self, message: Message, peer: int) -> bool:
        """Moves what fits of a message to ``peer``; whether all of it is through."""
        try:
            return push(message, self._out[peer], self._bells[peer])
        except UnisonoError as error:
            self._fail(message, error)
            return False

    def _wanted(self) -> Sequence[int]:
        """The sources from which something is expected."""
        peers = {message.peer for message in self._posted}
        peers |= {p for p, inbox in enumerate(self._in) if inbox.current is not None}
        return range(len(self._in)) if None in peers else sorted(p for p in peers if p is not None)

    def _pull(self, peer: int) -> None:
        """Takes what has come from ``peer``, as long as somebody wants it."""
        inbox = self._in[peer]
        while True:
            if inbox.current is None:
                inbox.current = self._open(peer, inbox)
            arriving = inbox.current
            if arriving is None or not self._take(arriving, inbox.ring, peer):
                return
            self._arrived(peer, arriving)

    def _take(self, arriving: Arriving, ring: Ring, peer: int) -> bool:
        """Copies what is there of a message; whether all of it is taken."""
        try:
            return take(arriving, ring, self._bells[peer])
        except UnisonoError as error:
            assert arriving.message is not None
            self._fail(arriving.message, error)
            self._drain(arriving, ring)
            return take(arriving, ring, self._bells[peer])

    def _arrived(self, peer: int, arriving: Arriving) -> None:
        """All of a message has been taken."""
        inbox = self._in[peer]
        inbox.current = None
        if arriving.refused:
            inbox.ring.want(-1)
        if arriving.message is not None:
            self._end_message(arriving.message)
        elif arriving.into is not None:
            inbox.aside.append(arriving)
            for message in self._posted:  # a receive may have come while its message was set aside
                if message.peer in (None, peer) and self._taken_aside(peer, message):
                    self._posted.remove(message)
                    return

    def _taken_aside(self, peer: int, task: Message) -> bool:
        """Hands over a message that was set aside, if there is one that ``task`` receives."""
        for waiting in self._in[peer].aside:
            if waiting.tag == task.tag:
                self._in[peer].aside.remove(waiting)
                task.source = peer
                if self._match(waiting, task):
                    assert waiting.into is not None
                    self._end_message(task, waiting.into)
                return True
        return False

    def _open(self, peer: int, inbox: Inbox) -> Arriving | None:
        """Reads the next head and finds out whom the message is for; None if nothing is there or nobody wants it."""
        wanting = [m for m in self._posted if m.peer in (None, peer)]
        if not wanting or inbox.ring.there() < UNIT:
            return None
        tag, nbytes, numel, dtype = read_head(inbox.ring.head())
        arriving = Arriving(tag, nbytes, numel, dtype, inbox.ring.opened(), None, None)
        for message in wanting:
            if message.tag == tag:
                self._posted.remove(message)
                message.source = peer
                if self._match(arriving, message):
                    arriving.into, arriving.message = message.data, message
                else:
                    self._drain(arriving, inbox.ring)
                return arriving
        arriving.into = torch.empty(nbytes, dtype=torch.uint8)
        return arriving

    def _drain(self, arriving: Arriving, ring: Ring) -> None:
        """Lets a refused message come, though nobody may wait here any more: its sender does."""
        arriving.refused = True
        ring.want(1)
        self._wake_worker()

    def _match(self, arriving: Arriving, message: Message) -> bool:
        """Whether sender and receiver agree; if not, the receive ends with the reason and the data is dropped."""
        call = message.call
        if arriving.numel == call.numel and arriving.dtype == name_of_dtype(call.dtype):
            return True
        sender, receiver = self._names[message.source], self._names[self._rank]
        error = MismatchError(
            f"rank {receiver} expects {call.describe()} ({call.numel} elements) from rank {sender}, which sent "
            f"{arriving.numel} elements of {arriving.dtype} (tag {message.tag}, {self._label}); the message was "
            "dropped: give send and recv tensors of one size and dtype"
        )
        said = refusal(arriving.number, message.tag, arriving.numel, arriving.dtype, call)
        assert self.refusals is not None
        self.refusals.refuse(self._in[message.source].ring, message.source, said)
        self._bells[message.source].add()
        self._flight.end(message.note, message.source)
        self._save_record(error)
        self._end(message, error)
        return False

    def _end_message(self, message: Message, aside: torch.Tensor | None = None) -> None:
        """All of a message is through; a received one lies in its tensor, or ``aside``."""
        error: UnisonoError | None = None
        try:
            if aside is not None:
                copy(message.data, aside)
            if message.after is not None:
                message.after()
        except UnisonoError as reason:
            error = reason
        except (RuntimeError, MemoryError) as reason:
            error = UnisonoError(f"a message could not be delivered: {type(reason).__name__}: {reason}")
        message.after = None
        self._flight.end(message.note, message.source)
        self._end(message, error)

    def _end(self, task: Task, error: BaseException | None = None) -> None:
        assert isinstance(task, Message)
        if task.wanted:
            self._want(task, -1)
        super()._end(task, error)

    def _nap(self, seconds: float) -> None:
        self._bells[self._rank].sleep(self._heard, seconds)

    def _messages(self) -> list[Message]:
        return [
            *self._posted,
            *(i.current.message for i in self._in if i.current and i.current.message),
            *self._to_go(),
        ]

    def _to_go(self) -> list[Message]:
        return [message for queue in self._sends for message in queue]

    def _look_around(self) -> None:
        now = time.monotonic()
        losses = {id(message): self._lost(message) for message in self._messages()}
        if any(losses.values()):
            self._carry(linger=False)  # what a peer sent before it left is there by now, and counts
        for peer, inbox in enumerate(self._in):
            if inbox.current and inbox.current.refused and loss(self._segment, peer, self._names[peer]):
                inbox.current.refused = False  # the rest will never come
        for message in self._messages():
            if gone := losses.get(id(message)):
                self._lose(message, lost(self.explain(message, "can not end", briefly=True), gone))
            elif now > message.deadline:
                waited = message.deadline - message.issued
                what = f"did not end within its timeout of {waited:g} s"
                self._fail(message, CollectiveTimeout(self.explain(message, what)))

    def _complaint(self, task: Task | None, outcome: str) -> UnisonoError | None:
        if not isinstance(task, Message) or task.peer is None or self.refusals is None:
            return super()._complaint(task, outcome)
        error, own = self.refusals.take(task.peer, task.number) or (None, False)
        if own:
            task.error = error
        return error if own or error is None else MismatchError(f"{error}. {outcome}")

    def _interrupt(self, task: Task) -> None:
        """A message of which nothing has moved yet is withdrawn; any other is waited for."""
        assert isinstance(task, Message)
        if task in self._posted or (task in self._to_go() and not task.started):
            outcome = f"The {task.call.op} that raises this was withdrawn: it has moved nothing."
            if error := self._complaint(task, outcome):
                self._fail(task, error)

    def _break_off(self, task: Task, error: UnisonoError, held: bool) -> None:
        """torch's send and recv wait for a Work that nobody sees: such a message is never taken up again."""
        self._fail(task, error)

    def _peers(self, message: Message) -> list[int]:
        """The ranks that could do the other part."""
        return [message.peer] if message.peer is not None else [p for p in range(len(self._in)) if p != self._rank]

    def _lost(self, message: Message) -> list[Loss]:
        """Why the peer will never do its part, or nothing; for any source, if all the others are gone."""
        found = [loss(self._segment, peer, self._names[peer]) for peer in self._peers(message)]
        return [each for each in found if each] if all(found) else []

    def _needs(self, task: Task) -> list[Identity]:
        """The only rank that could end this message, if nothing that it has issued so far can."""
        assert isinstance(task, Message)
        peers = self._peers(task) or [self._rank]
        if task.call.op == "send":
            certain = self._out[peers[0]].unwanted()
        else:
            sources = peers if task.peer is not None else range(len(self._in))
            certain = task in self._posted and all(self._in[peer].ring.silent() for peer in sources)
        return [self._segment.identity(peers[0])] if certain and len(peers) == 1 else []

    def explain(self, task: Task, what: str, briefly: bool = False, placed: bool = True) -> str:
        """A message that did not get through; see `Lane`."""
        assert isinstance(task, Message)
        peer = "any rank" if task.peer is None else f"rank {self._names[task.peer]}"
        way = f"to {peer}" if task.call.op == "send" else f"from {peer}"
        moved = task.moved if task.call.op == "send" else self._received(task)
        text = (
            f"{task.call.describe()} {way} (tag {task.tag}, {self._label}){task.place() if placed else ''} {what}: "
            f"{moved} of {task.data.numel()} bytes moved"
        )
        if task.call.op == "recv" and (others := self._unclaimed(self._peers(task), lying=False)):
            text += f", while {_listed(others)} {'are' if len(others) > 1 else 'is'} there"
        return text if briefly else text + lateness(self._segment, self._watch, self._peers(task), self._names, 0.3)

    def _unclaimed(self, peers: Sequence[int], lying: bool) -> list[str]:
        """The messages from ``peers`` that no receive has taken; those that lie in the rings too, if wanted."""
        return [
            f"a message with tag {each.tag} from rank {self._names[peer]} ({each.numel} elements of {each.dtype})"
            for peer in peers
            for each in (*self._in[peer].unclaimed(), *(self._in[peer].lying() if lying else ()))
        ]

    def lost(self) -> list[str]:
        """Words on messages to this rank that it has never received, and on its own to ranks that have left before.

        Told once: by the rank that leaves last.
        """
        with self._lock:
            others = self._unclaimed(range(len(self._in)), lying=True)
            for inbox in self._in:
                inbox.ring.opened(len(inbox.lying()))
            mine = [
                f"{ring.unopened()} to rank {self._names[peer]}"
                for peer, ring in enumerate(self._out)
                if ring.unopened() and self._segment.state(peer) == LEFT
            ]
        me = f"rank {self._names[self._rank]} leaves {self._label}"
        told = [f"{me} and has never received {_listed(others)}"] if others else []
        return told + [f"{me}; of its messages, these were never received: {', '.join(mine)}"] * bool(mine)

    def _received(self, message: Message) -> int:
        return next((i.current.moved for i in self._in if i.current and i.current.message is message), 0)

    def _fail(self, task: Task, error: UnisonoError) -> None:
        assert isinstance(task, Message)
        if task in self._posted:
            self._posted.remove(task)
        for inbox in self._in:
            if inbox.current is not None and inbox.current.message is task:
                inbox.current.message = inbox.current.into = None
        half_sent = task in self._to_go() and task.started and not isinstance(error, PeerLostError)
        if task in self._to_go() and task.peer is not None:
            self._sends[task.peer].remove(task)
            if not task.started:
                self._out[task.peer].post(-1)
        self._flight.fail(task.note)
        self._save_record(error)
        # A rank that goes on may keep its peers waiting over this: then they can say it.
        self._segment.say(self._rank, TROUBLE, f"{type(error).__name__}: {' '.join(str(error).split())}"[:_WORDS])
        self._end(task, error)
        if half_sent:  # half a message lies in the ring: nothing can follow it, here or there
            self._give_up(error)

    def _fail_all(self, error: UnisonoError) -> None:
        for message in self._messages():
            self._fail(message, error)


def _listed(messages: Sequence[str]) -> str:
    more = len(messages) - _NAMED
    return ", ".join(messages[:_NAMED]) + (f" and {more} more" if more > 0 else "")

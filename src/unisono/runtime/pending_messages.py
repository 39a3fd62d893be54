"""The pending messages of one rank: its rings both ways, sends, posted receives, arriving messages."""

from collections import deque
from collections.abc import Callable, Sequence

from unisono.runtime.message import Arriving, Inbox, Message
from unisono.runtime.mirrored_rings import MirroredRings
from unisono.runtime.network import Network
from unisono.transport import futex
from unisono.transport.layout import LEFT
from unisono.transport.ring import Ring
from unisono.transport.segment import Segment

__all__ = ["Job", "PendingMessages", "listed"]

Job = tuple[int, int, int, int, int, int, int]
"""The words of a job; see message_words.py."""
_NAMED = 3  # messages without a receive that errors name


class PendingMessages:
    """``outgoing`` and ``inboxes``: a ring to, and one from, each rank; ``posted``: receives.

    ``sends``: by peer, for those to which there are any.
    """

    def __init__(self, segment: Segment, rank: int) -> None:
        size, layout = segment.layout.world_size, segment.layout
        self._segment, self._rank = segment, rank
        self.outgoing = [Ring(segment, rank, peer) for peer in range(size)]
        self.inboxes = [Inbox(Ring(segment, peer, rank)) for peer in range(size)]
        self.bells = [
            futex.Counter(segment.words, (layout.bells + 64 * peer) // 4, segment.address) for peer in range(size)
        ]
        self.sends: dict[int, deque[Message]] = {}
        self.posted: list[Message] = []
        self._mirrored: MirroredRings | None = None
        if isinstance(network := segment.elsewhere, Network):
            into = [inbox.ring for inbox in self.inboxes]
            self._mirrored = MirroredRings(segment, rank, network, self.outgoing, into, self.bells)

    def reach(self, peers: Sequence[int]) -> None:
        """Makes sure that messages to and from ``peers`` go on to other hosts, where these are."""
        if self._mirrored is not None:
            for peer in peers:
                self._mirrored.use(peer)

    def busy(self) -> bool:
        """True if any message is under way."""
        return bool(self.posted or self.sends) or any(i.current and i.current.taken for i in self.inboxes)

    def all(self) -> list[Message]:
        """All that are under way."""
        arriving = [i.current.message for i in self.inboxes if i.current and i.current.message]
        sends = [message for queue in list(self.sends.values()) for message in list(queue)]  # others may write to them
        return [*self.posted, *arriving, *sends]

    def sources(self, message: Message) -> Sequence[int]:
        """The ranks that a receive names; this one is among any."""
        return range(len(self.inboxes)) if message.peer is None else (message.peer,)

    def peers(self, message: Message) -> list[int]:
        """The ranks that could do the other part."""
        return [peer for peer in self.sources(message) if message.peer is not None or peer != self._rank]

    def want(self, message: Message, change: int) -> None:
        """Publishes to the sources of a receive that it is posted (+1) or has ended (-1)."""
        message.wanted = change > 0
        for peer in self.sources(message):
            self.inboxes[peer].ring.want(change)

    def unmoved(self, message: Message) -> bool:
        """True if nothing of a message has moved yet."""
        waits = message.peer is not None and message in self.sends.get(message.peer, ()) and not message.started
        return message in self.posted or waits

    def needed(self, message: Message) -> int | None:
        """The only rank that could end this message, if nothing that it has issued so far can."""
        peers = self.peers(message) or [self._rank]
        if message.sends:
            certain = self.outgoing[peers[0]].unwanted()
        else:
            sources = [self.inboxes[peer] for peer in self.sources(message)]
            certain = message in self.posted and all(i.ring.idle() and i.current is None for i in sources)
        return peers[0] if certain and len(peers) == 1 else None

    def send(self, message: Message, peer: int) -> None:
        """Appends a send to ``peer``."""
        self.sends.setdefault(peer, deque()).append(message)

    def sent(self, message: Message) -> None:
        """Takes out a send that has ended."""
        assert message.peer is not None
        queue = self.sends[message.peer]
        queue.remove(message)
        if not queue:
            del self.sends[message.peer]

    def remove(self, message: Message, keep: bool) -> bool:
        """Takes a message out that has failed; whether a part of it lies in the ring, behind which nothing can go.

        ``keep``: another receive may take what a failed one has left half way.
        """
        if message in self.posted:
            self.posted.remove(message)
        for inbox in self.inboxes:
            if inbox.current is not None and inbox.current.message is message:
                inbox.current.withdraw(keep)
        if message.peer is None or message not in self.sends.get(message.peer, ()):
            return False
        self.sent(message)
        if not message.started:
            self.outgoing[message.peer].post(-1)
        return message.started

    def progress(self, message: Message) -> int:
        """Bytes of it that have moved."""
        if message.sends:
            return message.moved
        return next((i.current.moved for i in self.inboxes if i.current and i.current.message is message), 0)

    def unclaimed(self, peers: Sequence[int], global_ranks: Sequence[int], in_ring: bool) -> list[str]:
        """The messages from ``peers`` that no receive has taken; those that lie in the rings too, if wanted."""
        return [
            f"a message with tag {each.tag} from rank {global_ranks[peer]} ({each.numel} elements of {each.dtype})"
            for peer in peers
            for each in (*self.inboxes[peer].unclaimed(), *(self.inboxes[peer].in_ring() if in_ring else ()))
        ]

    def lost(self, global_ranks: Sequence[int], label: str) -> list[str]:
        """Words on messages that this rank has never received, and on its own to ranks that have left, each once."""
        others = self.unclaimed(range(len(self.inboxes)), global_ranks, in_ring=True)
        for inbox in self.inboxes:
            inbox.ring.opened(len(inbox.in_ring()))
        mine = [
            f"{ring.unopened()} to rank {global_ranks[peer]}"
            for peer, ring in enumerate(self.outgoing)
            if ring.unopened() and self._segment.state(peer) == LEFT
        ]
        me = f"rank {global_ranks[self._rank]} leaves {label}"
        lines = [f"{me} and has never received {listed(others)}"] if others else []
        return lines + [f"{me}; of its messages, these were never received: {', '.join(mine)}"] * bool(mine)

    def jobs(
        self, place: Callable[[Message], int], place_of: Callable[[Arriving, Ring], int]
    ) -> list[tuple[Message | Arriving, Job]]:
        """The jobs of this moment: the next message to each peer and from each.

        ``place`` gives the address of a message's bytes; below 0, it has failed.
        ``place_of`` gives where the bytes of what arrives go, 0 if nowhere.
        """
        found: list[tuple[Message | Arriving, Job]] = []
        for peer, queue in self.sends.items():
            message, kind = queue[0], queue[0].prepared
            if (at := place(message)) < 0:
                return self.jobs(place, place_of)  # without it, and what has failed with it
            found.append((message, (1, peer, kind.head, at, kind.nbytes, message.moved, int(message.started))))
        oldest: dict[int, Message] = {}  # receive, by source
        for message in self.posted:
            for peer in self.sources(message):
                oldest.setdefault(peer, message)
        for peer, inbox in enumerate(self.inboxes):
            if (arriving := inbox.current) is not None:
                at = place_of(arriving, inbox.ring)
                found.append((arriving, (0, peer, 0, at, arriving.nbytes, arriving.moved, 1)))
                continue
            if (first := oldest.get(peer)) is None:
                continue
            if (at := place(first)) < 0:
                return self.jobs(place, place_of)  # without it
            head = first.prepared.head if first.peer is not None else 0
            found.append((first, (0, peer, head, at, first.prepared.nbytes, 0, 0)))
        return found


def listed(messages: Sequence[str]) -> str:
    """Several in words, the first few by name."""
    more = len(messages) - _NAMED
    return ", ".join(messages[:_NAMED]) + (f" and {more} more" if more > 0 else "")

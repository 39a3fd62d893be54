"""The birth of a group over several hosts: every rank publishes where it is, and reads where the others are.

The places are published under the number of the first rank's memory, which tells this birth from an earlier one over
the same store.
"""

import json
import os
import time
from collections.abc import Callable, Sequence

from unisono.backend.birth import births, claimed_twice
from unisono.backend.member_registry import MemberRegistry
from unisono.backend.stores import JobStore
from unisono.errors import CollectiveTimeout, UsageError
from unisono.runtime.network import Network
from unisono.transport.handshake import Peer, check_transport, connect_gloo
from unisono.transport.host import Host, HostMap, Place
from unisono.transport.interfaces import address_for_peers
from unisono.transport.mesh import Connected
from unisono.transport.mpi import connect_mpi
from unisono.transport.process import start_time
from unisono.transport.segment import Segment, attach, create
from unisono.units import name_ranks

__all__ = ["FLUSH", "OverHosts"]

FLUSH = 10.0  # s that a rank which leaves waits for what it has sent to be on its way
_KNOWN = "known"  # in the place of a nonce: the default group knows the hosts
_PAUSE = 0.01  # s


class OverHosts:
    """The hosts of a group, as one of its ranks finds them, and its connection to the others.

    They are known before the group is joined if the default group is over several hosts.
    """

    def __init__(self, members: MemberRegistry, rank: int, global_ranks: Sequence[int], label: str) -> None:
        self._members, self._rank, self._global_ranks, self._label = members, rank, global_ranks, label
        self.hosts = members.known_hosts()
        self._birth = _KNOWN
        self._network: Network | None = None
        self._fd = -1

    @property
    def known(self) -> bool:
        """True if there are several hosts, and they are known."""
        return self.hosts is not None

    def attach(self, deadline: float, nonce: str = "") -> Segment | None:
        """This host's segment of a group over several hosts, which the first rank on each makes; None otherwise.

        ``nonce``: of the first rank's memory, on another host; None, too, if that is of an earlier group.
        """
        if not nonce and not self.known:
            return None
        hosts = self._find(nonce or _KNOWN, deadline)
        if hosts is None:
            return None
        store = self._members.store.under(f"{self._birth}/host/{hosts.mine}")
        if self._rank != hosts.local[0]:
            return attach(store, self._rank, len(self._global_ranks), deadline, self._members)
        segment, self._fd = create(store, len(self._global_ranks), self._label, nonce or self._members.nonce())
        return segment

    def look(self, segment: Segment, timeout: float) -> None:
        """Finds out whether ranks of a group other than the default one are elsewhere, if that does not know."""
        if not self.known and self._members.stands_alone() and self._members.spans_hosts():
            self._find(segment.nonce, time.monotonic() + timeout)

    def found(self, segment: Segment, deadline: float) -> bool:
        """Returns True, with the hosts known, if a rank has found this host's ``segment`` to be on another one."""
        store, ranks = self._members.store.under(f"places/{segment.nonce}"), range(len(self._global_ranks))
        if not any(store.check([str(rank)]) for rank in ranks):
            return False
        return self._find(segment.nonce, deadline) is not None

    def _find(self, nonce: str, deadline: float) -> HostMap | None:
        """Publishes where this rank is and returns where all are; None if ``nonce`` proves to be of an earlier birth.

        Raises `CollectiveTimeout` naming the ranks that have not come by ``deadline`` (``time.monotonic``),
        `MismatchError` if their versions differ, and what `MemberRegistry.check` raises.
        """
        store, size = self._members.store.under(f"places/{nonce}"), len(self._global_ranks)
        if store.add(f"came/{self._rank}", 1) > 1:
            self._check_claim(store)
            return None
        store.set(str(self._rank), json.dumps(self._place()))
        begun = time.monotonic()
        while missing := [rank for rank in range(size) if not store.check([str(rank)])]:
            if self._outdated(nonce):
                return None
            if time.monotonic() > deadline:
                raise CollectiveTimeout(
                    f"{self._label}: {name_ranks([self._global_ranks[rank] for rank in missing])} did not join within "
                    f"{deadline - begun:g} s (world size {size}, on several hosts). Are all started, with the same "
                    "address and port?"
                )
            self._members.report_claim(nonce)
            self._members.check()
            self._members.check_reasons()
            time.sleep(_PAUSE)
        if not self._members.counted:
            births(self._members.store, self._global_ranks, self._label)
        places = [Place(*json.loads(store.get(str(rank)))) for rank in range(size)]
        self._birth = nonce
        self.hosts = self._members.hosts = HostMap(places, self._rank)
        return self.hosts

    def _check_claim(self, store: JobStore) -> None:
        """Raises `UsageError` if another process of this host is this rank; else the place is of an earlier birth."""
        if not store.check([str(self._rank)]):
            return
        there = Place(*json.loads(store.get(str(self._rank))))
        if there.host == Host.mine().to_text() and there.pid != os.getpid() and start_time(there.pid):
            raise claimed_twice(self._global_ranks[self._rank], self._label, there.pid, there.hostname)

    def _place(self) -> Place:
        """Where this rank is; raises `UsageError`, once all can read why, if it names what is not there.

        An interface, or a transport of Gloo.
        """
        try:
            check_transport()
            return Place.mine(self._members.store.host())
        except UsageError as error:
            self._members.cannot_join(f"can not join it ({error})")
            raise

    def _outdated(self, nonce: str) -> bool:
        """True if the first rank, on another host, has made another memory since."""
        store = self._members.store
        return nonce != _KNOWN and store.check(["segment"]) and store.get("segment").decode().split()[2] != nonce

    def connect(self, segment: Segment, timeout: float, silence: float, engine: str) -> None:
        """Connects this rank to those of other hosts, if there are, by an ``engine``, see `Options`.

        ``silence``: seconds until a silent host is lost.
        """
        if self.hosts is None:
            return
        segment.longs[3] = int(self.hosts.oversubscribed)  # all ranks choose alike
        self._members.store.keep_alive(min(silence, timeout))
        store = self._members.store.under(f"{self._birth}/mesh")
        if engine == "mpi":
            messages = connect_mpi(store.plain("mpi"), self._rank, len(self._global_ranks))
            connected = Connected(messages, messages.shut_down)
        else:
            peers = [
                Peer(place.who(name), place.address)
                for name, place in zip(self._global_ranks, self.hosts.places, strict=True)
            ]
            # Where the store is on this host, another one has found the way to it.
            address = address_for_peers(self._members.store.host(), self.hosts.places[self.hosts.remote[0]].address)
            peers[self._rank] = peers[self._rank]._replace(address=address)
            connected = connect_gloo(store, self._rank, peers, segment.nonce, timeout, silence, self._check_others)
        self._network = Network(segment, self.hosts, self._global_ranks, connected)

    def _check_others(self) -> None:
        """Raises what makes waiting for the others vain: one does not join, or is another process."""
        self._members.check_claim()
        self._members.check_reasons()

    def start(self, serve: Callable[[Network], None]) -> None:
        """Begins to receive; ``serve``: makes known what answers the questions of other hosts."""
        if self._network is not None:
            serve(self._network)
            self._network.start()

    def leave(self, note: str, seconds: float = FLUSH) -> None:
        """Ends the connection, in ``seconds`` at most; the other hosts read ``note``."""
        if self._network is not None:
            network, self._network = self._network, None
            network.leave(note, seconds)

    def disown(self) -> None:
        """In a forked child: the connection is the parent's."""
        if self._network is not None:
            self._network.disown()
            self._network = None
        self.forget_fd()

    def forget_fd(self) -> None:
        """Closes the descriptor of the memory that this rank has made for its host."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

"""Connects the ranks of a group by Gloo, and proves every connection before anything else passes over it.

Gloo takes whoever connects first and names a small number for the peer. So each rank sends every other one a word that
only somebody can make who has read the group's nonce in the job's store; where a word is wrong or does not come, all
ranks drop their connections and connect again. A connection is that of one peer until it ends: what comes later over
one that is proved needs no further proof. Once all are connected nobody else can connect (listening.py).
"""

import errno
import hmac
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
from torch._C._distributed_c10d import ProcessGroupGloo

from unisono.errors import PeerLostError, UsageError
from unisono.transport.cork import NAME, connection_names
from unisono.transport.keepalive import keep_alive, peer_addresses, shut_down, sockets
from unisono.transport.listening import listeners, refuse_all
from unisono.transport.mesh import FOREVER, Connected, gist
from unisono.transport.process import OwnThread
from unisono.transport.segment import StoreLike

__all__ = ["Peer", "Stores", "check_transport", "connect_gloo", "make_gloo"]

_CONNECTING = 60.0  # s that ranks which are all there may take to connect
_ATTEMPTS = 3  # that share this time
_LATE = 8.0  # s after which a line is logged
_NO_WAY = [os.strerror(number).lower() for number in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)]
"""Errors that a stranger can not cause, so that it is of no use to connect again."""
_WORD = 32  # bytes
_PAUSE = 0.02  # s between two looks at the store, at most


class Stores(StoreLike, Protocol):
    """A store, and others in it."""

    def under(self, prefix: str) -> "Stores": ...  # noqa: D102
    def plain(self, prefix: str) -> Any: ...  # noqa: D102  # as torch's classes take it


class Peer(NamedTuple):
    """A rank to be connected: in words, and its address."""

    words: str
    address: str


def check_transport() -> None:
    """Raises `UsageError` if GLOO_DEVICE_TRANSPORT names what torch's Gloo here does not have: TCP_TLS, mostly."""
    if not (wanted := os.environ.get("GLOO_DEVICE_TRANSPORT", "")):
        return
    try:
        ProcessGroupGloo.create_device(hostname="127.0.0.1")
    except RuntimeError as error:
        words = gist(error)
        if "unsupported gloo device" in words:
            words = f"torch {torch.__version__} is built without it (TCP_TLS needs USE_GLOO_WITH_OPENSSL=1)"
        raise UsageError(
            f"GLOO_DEVICE_TRANSPORT is {wanted}: {words}; unset it, and encrypt the network between the hosts instead "
            "(WireGuard, IPsec), or use a torch that has it"
        ) from None


def connect_gloo(
    store: Stores, rank: int, peers: Sequence[Peer], nonce: str, timeout: float, limit: float,
    check: Callable[[], None],
) -> Connected:  # fmt: skip
    """Connects ``rank`` with the others; ``peers`` are all ranks, this one too, in order.

    ``nonce``: known to nobody who can not read the store. Logs a line after some seconds, and raises `PeerLostError` if
    not all are connected within ``timeout`` seconds, or within 60. ``limit``: seconds after which a host that does not
    answer is lost. ``check``: called while this waits; it raises what makes waiting vain.
    """
    before = sockets()

    own = peers[rank].address
    store.set(f"address/{rank}", own)

    def missing() -> str:
        there = {own, *peer_addresses(sockets() - before)}
        found = {
            each: store.get(f"address/{each}").decode()
            for each in range(len(peers))
            if store.check([f"address/{each}"])
        }
        absent = [
            f"{peer.words}, {found.get(each, 'which has not come to connect')}"
            for each, peer in enumerate(peers)
            if found.get(each) not in there
        ]
        return f"has no connection to {'; '.join(absent)}" if absent else "is connected, but others are not"

    def log_late() -> None:
        logging.getLogger("unisono").warning(
            "%s %s, after %g s: does a firewall drop packets, or is %s on the wrong interface (GLOO_SOCKET_IFNAME)?",
            *(peers[rank].words, missing(), _LATE, own),
        )

    late = threading.Timer(_LATE, log_late)
    late.daemon = True
    late.start()
    try:
        for number in range(_ATTEMPTS):
            deadline = time.monotonic() + min(timeout, _CONNECTING) / _ATTEMPTS
            found = _Attempt(store.under(str(number)), rank, len(peers), nonce, deadline, check).connect(own, limit)
            if isinstance(found, Connected):
                return found
            if any(each in found.lower() for each in _NO_WAY):
                break
    finally:
        late.cancel()
    raise PeerLostError(f"the ranks can not be connected over {own}: {found}; {peers[rank].words} {missing()}")


def make_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """torch's ProcessGroupGloo as torch makes it, whose sockets take no connection once its ranks are connected.

    Its connections are not proved.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    names, before = os.environ.get("GLOO_SOCKET_IFNAME", ""), listeners()
    made: Any = ProcessGroupGloo  # torch's stubs lack lazy_init, with which ranks would connect later
    devices = [made.create_device(interface=name, lazy_init=False) for name in names.split(",") if name]
    options._devices = devices or [made.create_default_device(lazy_init=False)]
    options._threads = 2 * len(options._devices)
    listening = listeners() - before
    gloo = ProcessGroupGloo(store, rank, size, options)
    refuse_all(listening)
    return gloo


class _Attempt:
    """One rank's part in connecting a group once."""

    def __init__(
        self, store: Stores, rank: int, size: int, nonce: str, deadline: float, check: Callable[[], None]
    ) -> None:  # fmt: skip
        self._store, self._rank, self._size, self._key = store, rank, size, nonce.encode()
        self._deadline, self._check = deadline, check
        self._peers = [peer for peer in range(size) if peer != rank]
        self._before = sockets()
        self._gloo: Any = None
        self._sockets: dict[int, int] = {}
        self._words = ""

    def connect(self, address: str, limit: float) -> Connected | str:
        """The connections, which all ranks have proved; or what went wrong, on this rank or another."""
        listening, proved = listeners(), False
        try:
            words = self._prove(address)
            proved = not words
        finally:
            made = sockets() - self._before
            refuse_all(listeners() - listening)
            if not proved:
                shut_down(made)
        if words:
            return words
        keep_alive(made, limit)
        return Connected(self._gloo, lambda: shut_down(made), self._sockets)

    def _prove(self, address: str) -> str:
        """Connects and waits until all ranks have proved their connections; returns what went wrong."""
        thread = OwnThread(target=self._run, args=(address,), name="unisono connects", daemon=True)
        thread.start()
        if not self._until(lambda: not thread.is_alive() or self._store.check(["failed"])):
            self._words = "what is connected has not shown the group's nonce"
        elif thread.is_alive():
            self._words = self._store.get("failed").decode()
        if self._words:
            self._store.set("failed", self._words)
            return self._words
        self._store.add("proved", 1)
        return self._agreed()

    def _run(self, address: str) -> None:
        """Connects with all other ranks, and exchanges words with them, and the names of the connections."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=max(1.0, self._deadline - time.monotonic()))
        room = NAME * 2 * self._size
        come = {peer: torch.zeros(_WORD + room, dtype=torch.uint8) for peer in self._peers}
        try:
            options._devices = [ProcessGroupGloo.create_device(hostname=address)]
            store = self._store.plain("gloo").clone()  # its own connection: Gloo waits in it
            gloo: Any = ProcessGroupGloo(store, self._rank, self._size, options)
            own = connection_names(sockets() - self._before)
            names = b"".join(own)[:room].ljust(room, b"\0")
            sent = {peer: bytearray(self._word(self._rank, peer) + names) for peer in self._peers}
            works = [gloo.recv([tensor], peer, 0) for peer, tensor in come.items()]
            works += [gloo.send([torch.frombuffer(word, dtype=torch.uint8)], peer, 0) for peer, word in sent.items()]
            for work in works:
                work.wait(FOREVER)
        except RuntimeError as error:
            self._words = gist(error)
            return
        for peer in self._peers:
            theirs = come[peer].numpy().tobytes()
            if not hmac.compare_digest(theirs[:_WORD], self._word(peer, self._rank)):
                self._words = f"what is connected as rank {peer} of the group does not know its nonce"
            for at in range(_WORD, len(theirs), NAME):
                if (fd := own.get(theirs[at : at + NAME])) is not None:
                    self._sockets[peer] = fd
        self._gloo = gloo

    def _word(self, source: int, target: int) -> bytes:
        return hmac.digest(self._key, f"{source} to {target}".encode(), "sha256")

    def _agreed(self) -> str:
        """Waits until all ranks have proved their connections; returns what went wrong."""
        store, size = self._store, self._size
        if not self._until(lambda: store.add("proved", 0) >= size or store.check(["failed"])):
            return "not all ranks are connected in time"
        return store.get("failed").decode() if store.check(["failed"]) else ""

    def _until(self, true: Callable[[], bool]) -> bool:
        pause = 0.0005
        while not true():
            if time.monotonic() > self._deadline:
                return False
            if pause >= _PAUSE:
                self._check()
            time.sleep(pause)
            pause = min(1.5 * pause, _PAUSE)
        return True

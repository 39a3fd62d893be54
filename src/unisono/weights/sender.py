"""`Sender`: a trainer's side of a meeting. It pushes versions; its rank 0 leads (coordinator.py, lead.py)."""

import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from unisono import errors
from unisono.errors import CollectiveTimeout, UnisonoError, UsageError
from unisono.weights.checksum import show_checksum
from unisono.weights.coordinator import Coordinator
from unisono.weights.holdings import Holdings, fresh_like
from unisono.weights.layout import Sharding
from unisono.weights.meeting import Listener, Note, connect, place_at
from unisono.weights.movement import Movement
from unisono.weights.participant import Again, Participant
from unisono.weights.plan import Plan
from unisono.weights.rules import Rule, rules_to_text
from unisono.weights.side import Side
from unisono.weights.source import Source as SourceOfMovement
from unisono.weights.terms import Terms
from unisono.weights.update import Report, Update
from unisono.weights.wire import Broken, Connection, Message, Who

__all__ = ["Sender"]

Source = nn.Module | Mapping[str, Tensor] | Callable[[], nn.Module | Mapping[str, Tensor]]
_BEYOND = 2.0  # s after its timeout that a push waits for rank 0 to say who is late


class Sender:
    """The trainer's side. See docs/weights.md.

    address: where receivers find it; port 0 of tcp picks one (read `address`). source: a module, a mapping of names to
    tensors, or a callable that returns one at each push. rules, shard: see `plan`, `layout`. receivers: how many
    replicas the first push waits for. group: the side's ranks. delta: leave out tensors that the replicas have.
    bucket: bytes that move together, at most. checksum: prove every tensor. lost: "raise", or "drop" for an update that
    goes on without replicas that die. backend: of the group of ranks on several hosts. timeout: seconds.

    Raises `UsageError` for an argument out of range, and an address that another sender uses.
    """

    def __init__(
        self,
        address: Any,
        source: Source,
        *,
        rules: Sequence[Rule] = (),
        shard: Sharding | None = None,
        receivers: int = 1,
        group: Any = None,
        delta: bool = False,
        bucket: int = 32 << 20,
        checksum: bool = True,
        lost: str = "raise",
        backend: str = "gloo",
        timeout: float = 60.0,
    ) -> None:
        if lost not in ("raise", "drop"):
            raise UsageError(f"lost={lost!r}: expected 'raise' or 'drop'")
        if receivers < 0 or bucket < 1 or timeout <= 0:
            raise UsageError(
                f"receivers={receivers}, bucket={bucket}, timeout={timeout}: expected at least 0, 1 and more than 0"
            )
        if delta and not checksum:
            raise UsageError("delta=True compares checksums: leave checksum=True")
        if backend != "gloo":
            raise UsageError(f"backend={backend!r}: expected 'gloo', which moves CPU tensors between hosts")
        place = place_at(address)
        self._side = group if isinstance(group, Side) else Side(group)
        self._timeout, self._source = timeout, source
        self._pushing = threading.RLock()
        self._background: Update | None = None
        self._settings: dict[str, Any] = {
            "rules": rules_to_text(rules),
            "delta": delta,
            "bucket": bucket,
            "checksum": checksum,
            "lost": lost,
            "backend": backend,
            "port": 0,
        }
        self._part = _Part(shard)
        self._coordinator: Coordinator | None = None
        self._store: Any = None
        self._closed = ""
        self.address: str = getattr(place, "address", "")
        """Where receivers find this sender."""
        self._meet(place, receivers)
        self._end = weakref.finalize(self, _leave, self._coordinator, self._part)

    def _meet(self, place: Any, receivers: int) -> None:
        """Rank 0 listens, the others connect to it."""
        side, error, found = self._side, None, None
        if side.rank == 0:
            try:
                listener = Listener(place)
                instance = secrets.token_hex(8)
                self._coordinator = Coordinator(listener, instance, side.world_size, receivers)
                found = (listener.note.to_text(), instance, listener.address)
            except UsageError as problem:
                error = problem
        found = side.of_first(found)
        if error is not None:
            raise error
        if found is None:
            raise UsageError(f"rank 0 of this side could not listen at {self.address}: its own error says why")
        text, instance, self.address = found
        note = Note.from_text(text)
        if self._coordinator is not None:
            connection = self._coordinator.own_connection()
        else:
            sock = connect(note)
            if sock is None:
                raise UsageError(f"rank {side.rank} of the sender can not connect to its rank 0 ({note.who})")
            connection = Connection(sock)
        part = self._part
        part.connection, part.lead, part.instance = connection, note.who, instance
        connection.send(
            "hello",
            protocol=1,
            sender=True,
            name="",
            instance=instance,
            rank=side.rank,
            world_size=side.world_size,
            who=Who.mine(),
            rules=None,
            mapped=False,
            bases=[],
            word=note.word,
        )

    # What users call

    def push(
        self,
        version: int | None = None,
        *,
        source: Source | None = None,
        background: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Hands the source's tensors to the replicas; returns a `Report` once all of them show the version.

        version: at least 0, more than the last; None: the last plus 1, from 1. source: in place of the one given
        before. background: the tensors are copied, and an `Update` is returned at once. timeout: seconds, in place of
        the sender's.

        Raises `UsageError`, `MismatchError`, `UpdateError`, `CorruptionError`, `PeerLostError`, `CollectiveTimeout`;
        until all is decided, the replicas then keep what they show.
        """
        self._check_open()
        if version is not None and (isinstance(version, bool) or not isinstance(version, int) or version < 0):
            raise UsageError(f"version={version!r}: expected an int of at least 0, or None for the next")
        if source is not None:
            self._source = source
        if self._background is not None:
            self._background._ended.wait()
        seconds = self._timeout if timeout is None else timeout
        with self._pushing:
            if not background:
                return self._push(version, self._source, seconds, 0)
            holdings = self._part.look(self._source)
            snapshot, nbytes = self._part.snapshot(holdings)
            self._background = Update(lambda: self._push_locked(version, snapshot, seconds, nbytes), "push")
            return self._background

    def _push_locked(self, version: int | None, source: Any, seconds: float, nbytes: int) -> Report:
        with self._pushing:
            return self._push(version, source, seconds, nbytes)

    def _push(self, version: int | None, source: Any, seconds: float, snapshot: int) -> Report:
        part = self._part
        error: BaseException | None = None
        try:
            part.current = source if isinstance(source, Holdings) else part.look(source)
        except BaseException as problem:
            if self._side.world_size == 1:
                raise
            error = problem
        self._settings["port"] = self._port()
        words = f"sender rank {self._side.rank} ({Who.mine()}) raised {type(error).__name__}: {error}" if error else ""
        with torch.inference_mode(False), torch.no_grad():
            try:
                part.send("push", version=version, timeout=seconds, error=words, **self._settings)
                if error is not None:
                    raise error
                return self._led(time.monotonic() + seconds + _BEYOND, snapshot)
            except Broken:
                raise part.lost() from None

    def _port(self) -> int:
        """Of the store over which the groups of line-ups meet."""
        if self._coordinator is None:
            return 0
        if self._store is None:
            self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            self._part.serve(self._store)
        return int(self._store.port)

    def _led(self, deadline: float, snapshot: int) -> Report:
        """Takes part in the update of this push, until its end."""
        part = self._part
        announced: Message | None = None
        while True:
            message = part.next_message(deadline)
            if message.kind == "refused":
                raise _error_of(message)
            if message.kind == "announce":
                announced = message
                try:
                    part.take_part(message, deadline, bases=[], tables=part.tables(message["delta"]))
                except Again:
                    announced = None
            elif message.kind == "done" and announced is not None and message["number"] == announced["number"]:
                part.version = message["version"]
                if message["error"]:
                    raise _error_of(message)
                return part.report(message, announced, snapshot)

    @property
    def version(self) -> int | None:
        """The version pushed last, None before the first."""
        return self._part.version

    @property
    def receivers(self) -> dict[str, int | None]:
        """The replicas that have joined, with the version that each shows; at rank 0, else empty."""
        parties = dict(self._coordinator.parties) if self._coordinator is not None else {}
        return {name: party.shows for name, party in sorted(parties.items()) if party.complete}

    @property
    def plan(self) -> Plan | None:
        """The plan of the last update, None before the first."""
        return self._part.plan

    def checksums(self) -> dict[str, str]:
        """The checksums of the version pushed last, 16 hexadecimal digits, by the receivers' names.

        Raises `UsageError` before the first push, or with ``checksum=False``.
        """
        if not self._settings["checksum"]:
            raise UsageError("this sender was made with checksum=False: it has none to show")
        if self._part.version is None:
            raise UsageError("nothing has been pushed yet: there are no checksums")
        return {name: show_checksum(value) for name, value in self._part.totals().items()}

    def close(self) -> None:
        """Leaves the address; receivers wait for the next sender."""
        if not self._closed:
            background = self._background
            if background is not None:
                background._ended.wait()
            self._closed = "closed"
            self._end()
            self._store = None

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"this sender at {self.address} was closed: make another")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _leave(coordinator: Coordinator | None, part: "_Part") -> None:
    """Ends a sender, at the latest with its process."""
    if coordinator is not None:
        coordinator.close("the sender has closed")
    elif part.connection is not None:
        with suppress(Broken):
            part.connection.send("bye", words="has closed")
    part.disconnect()


def _error_of(message: Message) -> UnisonoError:
    kind = getattr(errors, message["error"], errors.UpdateError)
    error: UnisonoError = kind(message["text"])
    return error


class _Part(Participant):
    """What a rank of the sender does in an update."""

    def __init__(self, shard: Sharding | None) -> None:
        super().__init__()
        self._holdings = Holdings(shard)
        self._shard = shard
        self._snapshot: Holdings | None = None
        self.current = self._holdings
        self.version: int | None = None
        self.plan: Plan | None = None
        self.bound = 0.0
        self._decided: tuple[Plan | None, Message | None] = None, None
        self._base: list[Any] = []  # the version that all replicas had been given last, and the checksums of its items
        self._known: dict[Any, int] = {}

    def look(self, source: Any) -> Holdings:
        """What this rank holds now."""
        self._holdings.look(source() if callable(source) and not isinstance(source, nn.Module) else source)
        return self._holdings

    def snapshot(self, holdings: Holdings) -> tuple[Holdings, int]:
        """A copy of what this rank holds, in memory that is kept for the next."""
        once = {name: t for name, t in holdings.local.items() if holdings.layout and name not in holdings.layout.ties}
        kept = self._snapshot
        if kept is None or kept.signature != holdings.signature:
            kept = self._snapshot = holdings.like(fresh_like(once, holdings.shared))
        with torch.inference_mode(False), torch.no_grad():
            torch._foreach_copy_([kept.local[name] for name in once], list(once.values()))
        return kept, sum(tensor.nbytes for tensor in once.values())

    def serve(self, store: Any) -> None:
        """This rank has the store itself."""
        self._store = store

    def lost(self) -> Exception:
        """The error of a rank 0 that is gone."""
        words = self.lead.end() if self.lead is not None else ""
        return errors.PeerLostError(f"sender rank 0 ({self.lead}): {words}; {self.kept()}")

    def next_message(self, deadline: float) -> Message:
        """The lead's next message."""
        assert self.connection is not None
        message = self.connection.wait(deadline)
        if message is None:
            doing = self.lead.activity() if self.lead is not None else ""
            raise CollectiveTimeout(f"sender rank 0 ({self.lead}) does not answer: {doing}; {self.kept()}")
        if message.kind == "bye":
            raise UsageError("rank 0 of this sender has closed: make another")
        return message

    def tables(self, delta: bool) -> bool:
        """True if the targets need this rank's table ahead of the data."""
        return delta or self.current.shared

    def holds(self) -> tuple[str, str]:
        return self.current.signature, self.current.text

    def fitted(self, movement: Movement) -> None:
        self.plan, self.bound = movement.plan, movement.plan.bound()

    def move(self, terms: Terms, announced: Message, bases: list[Any]) -> tuple[dict[str, int], bytes]:
        source = self._own_source()
        compare = self._compare(bases) if announced["delta"] else None
        shown = {rank: base[2] for rank, base in enumerate(bases) if base}
        source.send(self.current.local, terms, compare, shown)
        return {}, b""

    def _own_source(self) -> SourceOfMovement:
        assert self.movement is not None
        source = self.movement.source
        assert source is not None
        return source

    def _compare(self, bases: list[Any]) -> Callable[[Any], Any]:
        """Which items all their targets have already, by their checksums."""
        assert self.plan is not None
        source, chunks = self._own_source(), self.plan.chunks
        base, known = self._base, self._known
        fresh = [
            bool(base) and all(bases[target][:2] == base for target in chunks[window.chunk].targets)
            for window in source.windows
            for _ in window.items
        ]
        before = np.array([known.get(item[:3], -1) for item in source.items], dtype=np.int64)
        there = np.array([item[:3] in known for item in source.items], dtype=np.bool_)

        def compare(sums: Any) -> Any:
            return np.array(fresh, dtype=np.bool_) & there & (sums == before)

        return compare

    def forget(self) -> None:
        """Nothing was changed here."""

    def show(self, announced: Message, decided: Message, deadline: float) -> None:
        if announced["checksum"]:
            self._decided = self.plan, decided
        if announced["delta"]:
            source = self._own_source()
            self._base = [self.instance, announced["version"]]
            self._known = dict(zip((item[:3] for item in source.items), source.table[:, 1].tolist(), strict=True))

    def totals(self) -> dict[str, int]:
        """The checksums of the version pushed last."""
        plan, decided = self._decided
        return _totals(plan, decided) if plan is not None and decided is not None else {}

    def kept(self) -> str:
        return f"version {self.version} is kept" if self.version is not None else "no version was shown before"

    def report(self, done: Message, announced: Message, snapshot: int) -> Report:
        """What a push returns."""
        return Report(
            done["version"],
            tuple(done["receivers"]),
            tuple(done["lost"]),
            done["tensors"],
            done["skipped"],
            done["nbytes"],
            done["moved"],
            snapshot,
            done["seconds"],
            self.bound,
            announced["checksum"],
        )


def _totals(plan: Plan, decided: Message) -> dict[str, int]:
    """The checksums of all whole tensors, by the names of all replicas."""
    found: dict[str, int] = {}
    at = 0
    for fit, lengths in zip(plan.fits, decided["lengths"], strict=True):
        total = np.zeros(len(fit.tensors), dtype=np.uint64)
        for length in lengths:
            total += np.frombuffer(decided.data[at : at + length], dtype=np.uint64)
            at += length
        sums: dict[str, int] = dict(zip(fit.tensors, total.tolist(), strict=True))
        found |= sums | {other: sums[first] for other, first in fit.ties.items()}
    return found

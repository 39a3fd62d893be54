"""`Sender`: a trainer's side of a meeting. It pushes versions; its rank 0 leads (coordinator.py, lead.py)."""

import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

import torch
from torch import Tensor, nn

from unisono import errors
from unisono.errors import UnisonoError, UsageError, kind_and_text
from unisono.weights.apart import check_backend
from unisono.weights.arguments import check_version, flag, seconds_of, whole_number
from unisono.weights.checksum import show_checksum
from unisono.weights.coordinator import Coordinator
from unisono.weights.holdings import Holdings
from unisono.weights.meeting import Listener, Note, connect, place_at
from unisono.weights.participant import Again, given_up
from unisono.weights.plan import Plan
from unisono.weights.rules import Rule, rules_to_text
from unisono.weights.sending import Sending
from unisono.weights.sharding import Sharding, check_sharding
from unisono.weights.side import Side, check_rules
from unisono.weights.update import Report, Update
from unisono.weights.wire import PROTOCOL, Broken, Connection, Message, Who

__all__ = ["Sender"]

Source = nn.Module | Mapping[str, Tensor] | Callable[[], nn.Module | Mapping[str, Tensor]]
_BEYOND = 2.0  # s after its timeout that a push waits for rank 0 to say who is late


class Sender:
    """The trainer's side. See docs/weights.md.

    address: where receivers find it; port 0 of tcp picks one (read `address`). source: a module, a mapping of names to
    tensors, or a callable that returns one at each push. rules, shard: see `plan`, `layout`. receivers: how many
    replicas the first push waits for. group: the side's ranks. delta: leave out tensors that the replicas have.
    bucket: bytes that move together, at most. checksum: prove every tensor. lost: "raise", or "drop" for an update that
    goes on without replicas that die. backend: of the group of ranks on several hosts, "gloo", "unisono" or one
    that is registered for CPU tensors. timeout: seconds.

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
        check_sharding(shard)
        if not isinstance(source, nn.Module | Mapping) and not callable(source):
            raise UsageError(
                f"source={source!r}: expected a module, a mapping of names to tensors, or a callable that returns one"
            )
        if flag(delta, "delta") and not flag(checksum, "checksum"):
            raise UsageError("delta=True compares checksums: leave checksum=True")
        receivers, place = whole_number(receivers, "receivers", 0), place_at(address)
        self._timeout, self._source = seconds_of(timeout, zero=False), source
        self._pushing = threading.RLock()
        self._background: Update | None = None
        self._settings: dict[str, Any] = {
            "rules": rules_to_text(check_rules(rules)),
            "delta": delta,
            "bucket": whole_number(bucket, "bucket", 1),
            "checksum": flag(checksum, "checksum"),
            "lost": lost,
            "backend": check_backend(backend),
        }
        self._side = group if isinstance(group, Side) else Side(group)
        self._part = Sending(shard)
        self._coordinator: Coordinator | None = None
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
                self._settings["port"] = self._part.open_door()
                self._coordinator = Coordinator(listener, instance, side.world_size, receivers)
                found = (listener.note.to_text(), instance, listener.address)
            except UsageError as problem:
                error = problem
        found = side.of_first(found, "Sender")
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
            protocol=PROTOCOL,
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
        check_version(version)
        flag(background, "background")
        seconds = self._timeout if timeout is None else seconds_of(timeout)
        if self._background is not None:
            self._background._ended.wait()
        with self._pushing:
            before = self._source
            self._source = before if source is None else source
            try:
                self._look(self._source, version, seconds)
            except BaseException:
                self._source = before
                raise
            if not background:
                return self._push(version, self._part.current, seconds, 0)
            snapshot, nbytes = self._part.snapshot(self._part.current)
            self._background = Update(lambda: self._push_locked(version, snapshot, seconds, nbytes), "push")
            return self._background

    def _push_locked(self, version: int | None, source: Any, seconds: float, nbytes: int) -> Report:
        with self._pushing:
            return self._push(version, source, seconds, nbytes)

    def _push(self, version: int | None, source: Any, seconds: float, snapshot: int) -> Report:
        part = self._part
        self._look(source, version, seconds)
        with torch.inference_mode(False), torch.no_grad():
            try:
                self._announce(version, seconds)
                return self._led(time.monotonic() + seconds + _BEYOND, snapshot)
            except Broken:
                raise part.lost() from None

    def _look(self, source: Any, version: int | None, seconds: float) -> None:
        """Looks at the tensors; the other ranks, whose push waits for this one's, read what that raises."""
        part = self._part
        try:
            part.current = source if isinstance(source, Holdings) else part.look(source)
        except BaseException as error:
            if self._side.world_size > 1:
                with suppress(Broken):
                    self._announce(version, seconds, self._words_on(error))
            raise

    def _words_on(self, error: BaseException) -> str:
        return f"sender rank {self._side.rank} ({Who.mine()}) raised {kind_and_text(error)}"

    def _announce(self, version: int | None, seconds: float, error: str = "") -> None:
        """Sends rank 0 that this rank pushes, or what has kept it from that."""
        part = self._part
        part.call += 1
        data, ready = (b"", {}) if error else part.ready(self._settings["delta"])
        part.send(
            "push", data, call=part.call, version=version, timeout=seconds, error=error, **ready, **self._settings
        )

    def _led(self, deadline: float, snapshot: int) -> Report:
        """Takes part in the update of this push, until its end."""
        part = self._part
        announced: Message | None = None
        while True:
            try:
                message = part.next_message(deadline)
            except BaseException as error:
                with suppress(Broken):
                    part.send("withdraw", call=part.call, text=self._words_on(error))
                raise
            if message.get("call", part.call) != part.call:
                continue
            if message.kind == "refused":
                raise given_up(message, message["version"], part.kept)
            if message.kind == "announce":
                announced = message
                try:
                    part.take_part(message, deadline, None)
                except Again:
                    announced = None
            elif message.kind == "done" and announced is not None and message["number"] == announced["number"]:
                part.version, part.shown = message["version"], message["shows"]
                if message["error"]:
                    raise _error_of(message)
                return part.report(message, announced, snapshot)

    @property
    def version(self) -> int | None:
        """The version pushed last, None before the first."""
        return self._part.version

    @property
    def receivers(self) -> dict[str, int | None]:
        """The replicas that have joined, with the version each shows: now at rank 0, elsewhere after the last push."""
        return self._coordinator.shown() if self._coordinator is not None else dict(self._part.shown)

    @property
    def plan(self) -> Plan | None:
        """The plan of the last update, None before the first."""
        return self._part.plan

    def checksums(self) -> dict[str, str]:
        """The checksums of the version pushed last, 16 hexadecimal digits, by the receivers' names.

        Raises `UsageError` before the first push, or with ``checksum=False``.
        """
        self._check_open()
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

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"this sender at {self.address} was closed: make another")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _leave(coordinator: Coordinator | None, part: "Sending") -> None:
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

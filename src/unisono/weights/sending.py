"""What a rank of the sender does in an update: looks at its tensors, hands them over, knows what was sent."""

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from unisono import errors
from unisono.errors import CollectiveTimeout, UsageError
from unisono.weights.holdings import Holdings, fresh_like
from unisono.weights.movement import Movement
from unisono.weights.participant import Participant
from unisono.weights.plan import Plan
from unisono.weights.sharding import Sharding
from unisono.weights.source import Source as SourceOfMovement
from unisono.weights.terms import Numbers, Terms
from unisono.weights.update import Report
from unisono.weights.windows import Item
from unisono.weights.wire import Message, fork_safe

__all__ = ["Sending"]


class Sending(Participant):
    """What a rank of the sender does in an update."""

    def __init__(self, shard: Sharding | None) -> None:
        super().__init__()
        self._holdings = Holdings(shard)
        self._shard = shard
        self._snapshot: Holdings | None = None
        self.current = self._holdings
        self.call = 0
        """Numbers the pushes: what the lead says of an earlier one, which was interrupted, is not heeded."""
        self.version: int | None = None
        self.shown: dict[str, int | None] = {}
        """The version that each replica showed after the last push."""
        self.plan: Plan | None = None
        self.bound = 0.0
        self._door: socket.socket | None = None
        self._decided: tuple[Plan | None, Message | None] = None, None
        self._base: list[Any] = []  # the version that all replicas had been given last, and the checksums of its items
        self._known: tuple[list[Item], Numbers] = [], np.zeros(0, dtype=np.int64)

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

    def open_door(self) -> int:
        """At rank 0: the port of the store over which ranks of several hosts meet. It is served once there are some."""
        self._door = socket.create_server(("", 0), family=socket.AF_INET)
        fork_safe(self._door)
        return int(self._door.getsockname()[1])

    def _store_at(self, port: int, limit: timedelta) -> Any:
        if self._door is None:
            return super()._store_at(port, limit)
        door = self._door.detach()
        return TCPStore("localhost", port, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=door)

    def disconnect(self) -> None:
        """Ends the connection, and what depends on it."""
        super().disconnect()
        if self._door is not None:
            self._door.close()

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

    def ready(self, delta: bool) -> tuple[bytes, dict[str, Any]]:
        """What a push reports: what this rank holds, and whether the targets need its table ahead of the data."""
        data, described = self.description()
        return data, described | {"tables": delta or self.current.shared}

    def holds(self) -> tuple[str, str]:
        """What was looked at for this push."""
        return self.current.signature, self.current.text

    def fitted(self, movement: Movement) -> None:
        """A new line-up."""
        self.plan, self.bound = movement.plan, movement.plan.bound()

    def move(self, terms: Terms, announced: Message, bases: list[Any]) -> tuple[dict[str, int], bytes]:
        """Hands over this rank's tensors."""
        source = self._own_source()
        compare = self._compare(bases) if announced["delta"] else None
        shown = {rank: base[2] for rank, base in enumerate(bases) if base}
        assert self.movement is not None
        source.send(self.current.local, self.current.key, terms, compare, shown)
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
        known = [
            bool(self._base) and all(bases[target][:2] == self._base for target in chunks[window.chunk].targets)
            for window in source.windows
        ]
        counts = np.array([len(window.items) for window in source.windows], dtype=np.int64)
        fresh = np.repeat(np.array(known, dtype=np.bool_), counts)
        items, before = self._known
        there = np.ones(len(before), dtype=np.bool_)
        if items is not source.items:  # another line-up
            found = dict(zip((item[:3] for item in items), before.tolist(), strict=True))
            there = np.array([item[:3] in found for item in source.items], dtype=np.bool_)
            before = np.array([found.get(item[:3], -1) for item in source.items], dtype=np.int64)

        def compare(sums: Any) -> Any:
            return fresh & there & (sums == before)

        return compare

    def forget(self) -> None:
        """Nothing was changed here."""

    def show(self, announced: Message, decided: Message, deadline: float) -> None:
        """Keeps what the next update compares with."""
        if not decided["lengths"]:  # it went to nobody
            self._decided, self._base = (None, None), []
            return
        if announced["checksum"]:
            self._decided = self.plan, decided
        if announced["delta"]:
            source = self._own_source()
            self._base = [self.instance, announced["version"]]
            self._known = source.items, source.table[:, 1].copy()

    def totals(self) -> dict[str, int]:
        """The checksums of the version pushed last."""
        plan, decided = self._decided
        return _totals(plan, decided) if plan is not None and decided is not None else {}

    def kept(self) -> str:
        """Words on the version that stays."""
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
            self.bound if done["receivers"] else 0.0,
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

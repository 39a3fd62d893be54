"""What a rank of a replica does in an update: fit, move into the engine, check, show."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from torch import Tensor

from unisono.errors import CollectiveTimeout, CorruptionError, UsageError
from unisono.weights.checksum import show_checksum
from unisono.weights.engine import ModuleEngine, as_engine
from unisono.weights.exposed import Exposed
from unisono.weights.hold import Holds
from unisono.weights.holdings import signature_of
from unisono.weights.lineup import left
from unisono.weights.movement import Movement
from unisono.weights.participant import Participant, marked
from unisono.weights.plan import Plan
from unisono.weights.published import check_mappable
from unisono.weights.sharding import Sharding
from unisono.weights.target import Arrival, Landing, Target
from unisono.weights.terms import Terms
from unisono.weights.together import begin_together, depend
from unisono.weights.update import Report
from unisono.weights.wire import Broken, Message, Who

__all__ = ["Receiving"]

_LOOK = 0.05  # s between two looks at the connection while threads hold
_QUIET = 1.0  # s that a look at who has a tensor's memory waits for threads that hold


class Receiving(Participant):
    """A replica's rank."""

    def __init__(self, engine: Any, shard: Sharding | None, name: str, mapped: bool, rank: int) -> None:
        """Raises `UsageError` for what is no engine."""
        super().__init__()
        self.engine = as_engine(engine, shard)
        self._module = self.engine if isinstance(self.engine, ModuleEngine) else None
        if mapped and (self._module is None or self._module.in_place):
            raise UsageError("mapped=True shows views of a published copy: give a module, or a ModuleEngine that swaps")
        self.name, self._rank = name, rank
        self.holds_of = Holds()
        self.plan: Plan | None = None
        self._mapped = mapped
        self._copy = self._next_copy = 0  # of published copies: that which is shown, that which is to be
        self._target: Target | None = None
        self._described: tuple[str, str] = ("", "")
        self._loading: list[str] = []
        self._ahead = self._writing = self._depends = False
        self._tables = False  # went ahead of the data of the last update, for which nothing need be exposed
        self._exposed: Exposed | None = None  # memory that sources may write to, until the update is decided
        self._ahead_bases: list[Any] | None = None  # reported ahead
        self._arrival: Arrival | None = None
        self._shown_by = ""  # the sender of the version shown
        self._names: list[str] = []
        self._ties: Mapping[str, str] = {}
        self._parts = self._sums = np.zeros(0, dtype=np.uint64)  # checksums, of this rank's parts and of the whole
        self._checked = False
        self.bound = 0.0
        self._report: Report | None = None

    # As `Participant` asks

    def holds(self) -> tuple[str, str]:
        """Looks at the engine's tensors, unless `look_ahead` just has."""
        ahead, self._ahead = self._ahead, False
        if ahead and self._module is not None:
            return self._module.description
        if self._module is not None and type(self._module).layout is ModuleEngine.layout:
            self._module.look()
            return self._module.description
        if self.lineup is None or not self._described[0]:
            text = self.engine.layout().to_text()
            self._described = signature_of(text), text
        return self._described

    def fitted(self, movement: Movement) -> None:
        """A new line-up."""
        self.plan, self._target, self.bound = movement.plan, Target(movement), movement.plan.bound()
        self._depends = depend(movement.plan, movement.lineup.replica)
        if self._mapped:
            lineup = movement.lineup
            if movement.publishing is None or not lineup.here:
                raise UsageError(f"replica {self.name!r} can not be mapped: the sender is on another host")
            assert self._module is not None
            fit, own = movement.plan.fits[lineup.replica], lineup.own
            check_mappable(self.name, fit, self._target.layout, own, self._module.live, self._free())

    def _free(self) -> set[str]:
        """The names whose memory is theirs and their ties' alone, while no thread that holds makes views of it."""
        module = self._module
        assert module is not None
        if module.seen_elsewhere and self.holds_of.begin(time.monotonic() + _QUIET):
            try:
                return module.free - module.seen_elsewhere
            finally:
                self.holds_of.done()
        return module.free

    def move(self, terms: Terms, announced: Message, bases: list[Any]) -> tuple[dict[str, int], bytes]:
        """Moves the tensors into the engine, and checks them."""
        target, module = self._target, self._module
        assert target is not None
        self._tables = terms.tables
        if module is not None:
            module.begin()
        if self._mapped:
            return self._reported(self._move_mapped(terms), terms)
        if module is None:
            return self._reported(target.receive(None, {}, self._load, terms), terms)
        self._begin_in_place(terms)
        put = self._exposed if terms.exposed else None
        if put is not None:
            module.land(put, target.exposed_places)
        elif not module.in_place:
            module.prepare(target.order)
        landing = Landing(module.standby, module.standby_key, module.takes_any, put is not None)
        arrival = target.receive(landing, module.live, self._load, terms)
        if landing.summing:
            module.arrived(arrival.loaded)
        return self._reported(arrival, terms)

    def _move_mapped(self, terms: Terms) -> Arrival:
        target, module = self._target, self._module
        assert target is not None
        assert module is not None
        assert target.movement.publishing is not None
        arrival, copy = target.receive_published(self._load, terms, not module.takes_any)
        self._next_copy = copy.nonce
        module.adopt(copy, target.movement.publishing.places)
        return arrival

    def _reported(self, arrival: Arrival, terms: Terms) -> tuple[dict[str, int], bytes]:
        """What is reported of what came; raises `CorruptionError`."""
        target = self._target
        assert target is not None
        if arrival.wrong:
            raise self._corrupted(arrival)
        self._arrival = arrival
        stats = {
            "tensors": len(arrival.loaded),
            "skipped": arrival.skipped,
            "nbytes": arrival.nbytes,
            "moved": arrival.moved,
            "holds": int(self._depends and self.holds_of.used),
        }
        return stats, target.share.tobytes() if terms.checksum else b""

    def _begin_in_place(self, terms: Terms) -> None:
        """Waits until nobody holds, where the tensors that serve are written."""
        if self._module is not None and self._module.in_place and not self._writing:
            if not self.holds_of.begin(terms.deadline):
                raise CollectiveTimeout(
                    "threads of this replica held a version all the time, and it is written in place"
                )
            self._writing = True

    def _load(self, bucket: dict[str, Tensor]) -> None:
        module = self._module
        if module is None or not module.takes_any:
            self._loading = list(bucket)
            self.engine.load(bucket)
            self._loading = []
        if module is not None:
            module.arrived(bucket)

    def _corrupted(self, arrival: Arrival) -> CorruptionError:
        listed = [
            f"{name} (checksum {show_checksum(found)}, sent {show_checksum(sent)})"
            for name, sent, found in arrival.wrong[:10]
        ]
        more = f" and {len(arrival.wrong) - 10} more" if len(arrival.wrong) > 10 else ""
        words = f"found other bits than were sent in {', '.join(listed)}{more}"
        error = CorruptionError(f"{self._own_words()} {words}")
        error.for_others = words  # type: ignore[attr-defined]
        return error

    def _own_words(self) -> str:
        return f"replica {self.name!r} rank {self._rank} ({Who.mine()})"

    def doing(self) -> str:
        """Words on what this rank was at."""
        shown = ", ".join(self._loading[:5]) + (" …" if len(self._loading) > 5 else "")
        return f", while {shown} was loaded" if self._loading else ""

    def forget(self) -> None:
        """The update is off."""
        self._loading = []
        try:
            self.engine.commit(None)
        finally:
            if self._writing:
                self._writing = False
                self.holds_of.version = None
                self.holds_of.done()

    def show(self, announced: Message, decided: Message, deadline: float) -> None:
        """Shows the version as soon as nobody holds the one before."""
        version = announced["version"]

        def commit() -> None:
            self._commit(version, announced, decided)

        def late() -> None:
            try:
                commit()
                self.send("shown", number=announced["number"], version=version)
            except Exception as error:
                self.report_failure(announced["number"], error)

        if not self._writing and not self._begin_to_show(announced, decided, deadline, late):
            words = f"version {version} stands, but threads of replica {self.name!r} still hold the version before"
            raise marked(CollectiveTimeout(f"{words}: it is shown as soon as they leave"))
        try:
            commit()
        finally:
            self._writing = False
            self.holds_of.done()

    def _begin_to_show(self, announced: Message, decided: Message, deadline: float, late: Callable[[], None]) -> bool:
        """As `Holds.begin`; ranks that hold parts of tensors show a version between the same holds."""
        if not decided.get("together"):
            return self.holds_of.begin(deadline, late, 0)
        assert self.connection is not None
        return begin_together(self.connection, self.holds_of, announced["number"], deadline, late)

    def _commit(self, version: int, announced: Message, decided: Message) -> None:
        try:
            self.engine.commit(version)
        except BaseException:
            self.holds_of.version = None
            raise
        target = self._target
        assert target is not None
        self.holds_of.shown(version)
        self._shown_by, self._copy = self.instance, self._next_copy
        self._exposed = None
        self._checked = announced["checksum"]
        if not self._checked:
            return
        self._parts = target.sums
        self._sums = target.share
        if decided.data:
            lengths = decided["lengths"][0]
            parts = np.frombuffer(decided.data, dtype=np.uint64).reshape(len(lengths), -1)
            self._sums = parts.sum(axis=0, dtype=np.uint64)
        self._names, self._ties = target.names, target.ties
        if self._module is not None and self._module.overlapping:
            self._check_agreement(self._module.overlapping)

    def _check_agreement(self, names: list[str]) -> None:
        """Raises `CorruptionError` for tensors with memory in common to which different values have been sent."""
        if self._changed(names):
            self.holds_of.version = None
            words = f"has tensors that share memory, and what was sent to them does not agree: {', '.join(names)}"
            error = CorruptionError(f"{self._own_words()} {words}: give each memory of its own")
            error.for_others = words  # type: ignore[attr-defined]
            raise error

    def kept(self) -> str:
        """Words on the version that stays."""
        if self._writing:
            return "part of it was written in place, so no version is shown until the next whole one"
        version = self.holds_of.version
        return f"version {version} is kept" if version is not None else "no version is shown yet"

    # As `Receiver` asks

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Reports that this rank is ready before an update is announced, which then need not wait for that.

        For a caller whose thread waits for the update: what others do to the model meanwhile is not seen.
        """
        self._ahead = self._module is not None and self._module.unchanged
        ahead = self._ahead and self.holds_of.settle(0.0)
        if ahead:
            data, described = self.description()
            self._ahead_bases = self.bases()
            self.send("waits", data, bases=self._ahead_bases, **described)
        try:
            yield
        except BaseException:
            self._ahead_bases = None
            if ahead:
                with suppress(Broken):
                    self.send("leaves")
            raise

    def settle(self, announced: Message, deadline: float) -> None:
        """Waits until a version that threads held off is shown, for it is in the standby.

        Returns early if the announced update is given up. Raises `CollectiveTimeout`.
        """
        assert self.connection is not None
        while not self.holds_of.settle(min(_LOOK, left(deadline))):
            if time.monotonic() >= deadline:
                raise self.late(announced["number"], announced["version"])
            message = self.connection.receive()
            if message is not None:
                self.connection.unread(message)
                return

    def bases(self) -> list[Any]:
        """The sender and the version of what is shown, its published copy, and memory in which the next may land."""
        ahead, self._ahead_bases = self._ahead_bases, None
        if ahead is not None:
            return ahead
        version = self.holds_of.version
        return [self._shown_by, version, self._copy, self._expose()] if version is not None else []

    def _expose(self) -> list[int] | None:
        """Memory for the next version: the line-up, a descriptor, the file."""
        module, target, lineup = self._module, self._target, self.lineup
        if module is None or not self.holds_of.settle(0.0):
            return None
        if self._exposed is not None:  # the update before was given up
            module.withdraw(self._exposed)
            self._exposed = None
        if target is None or lineup is None or not target.movement.puts or self._tables:
            return None
        self._exposed = module.expose(target.exposed_places, target.exposed_nbytes)
        return [lineup.number, self._exposed.fd, self._exposed.nonce] if self._exposed is not None else None

    def report(self, announced: Message, seconds: float) -> Report:
        """What a pull returns."""
        arrival, target, lineup = self._arrival, self._target, self.lineup
        assert arrival is not None
        assert target is not None
        assert lineup is not None
        self._report = Report(
            announced["version"],
            tuple(lineup.names),
            (),
            len(arrival.loaded),
            arrival.skipped,
            arrival.nbytes,
            arrival.moved,
            0,
            seconds,
            self.bound,
            announced["checksum"],
        )
        return self._report

    def last_report(self, version: int) -> Report:
        """The report of the version shown."""
        report = self._report
        return report if report is not None and report.version == version else Report(version, (self.name,))

    def totals(self) -> dict[str, int]:
        """The checksums of the whole tensors of the version shown, by name."""
        self._check_checked()
        sums = dict(zip(self._names, self._sums.tolist(), strict=True))
        return sums | {other: sums[first] for other, first in self._ties.items()}

    def _check_checked(self) -> None:
        if self.holds_of.version is None:
            raise UsageError("no version is shown yet: there are no checksums")
        if not self._checked:
            raise UsageError("this version came from a sender with checksum=False: it has no checksums")

    def verify(self) -> None:
        """Compares the live tensors with the version shown."""
        self._check_checked()
        if self._module is None or self._target is None:
            raise UsageError("verify reads a module's tensors; this engine has its own")
        wrong = self._changed(self._target.order)
        if wrong:
            listed = ", ".join(
                f"{name} (checksum {show_checksum(found)}, of the version {show_checksum(sent)})"
                for name, (found, sent) in wrong.items()
            )
            shown = f"shows version {self.holds_of.version}, but these tensors have been changed since"
            raise CorruptionError(f"{self._own_words()} {shown}: {listed}")

    def _changed(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """The live tensors of these that are not the version's, with both checksums."""
        assert self._module is not None
        assert self._target is not None
        live = self._module.look().local
        there = [name for name in names if name in live and name in self._target.order]
        found = self._target.checker(there, live).sums()
        parts = dict(zip(self._names, self._parts.tolist(), strict=True))
        return {name: (found.get(name, 0), parts[name]) for name in there if found.get(name, 0) != parts[name]}

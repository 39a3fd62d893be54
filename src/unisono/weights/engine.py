"""Engines: what a replica does with the tensors of a version. Three methods; `ModuleEngine` has them for a module."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.weights.arguments import flag
from unisono.weights.exposed import Exposed
from unisono.weights.holdings import Holdings, Memory, alone, fresh_like, overlapping
from unisono.weights.inspection import named_tensors
from unisono.weights.layout import Layout
from unisono.weights.published import File, Place
from unisono.weights.sharding import Sharding
from unisono.weights.small import SmallTensors

__all__ = ["Engine", "ModuleEngine", "as_engine"]

_FEW = 1 << 20  # bytes of some of a replica's tensors that are copied at once


@runtime_checkable
class Engine(Protocol):
    """What a `Receiver` asks of a replica."""

    def layout(self) -> Layout:
        """What this rank holds. What it raises gives the update up."""
        ...

    def load(self, bucket: Mapping[str, Tensor]) -> None:
        """Takes tensors, this rank's parts, each once an update; they are valid within the call.

        What it raises gives the update up.
        """
        ...

    def commit(self, version: int | None) -> None:
        """Shows what was loaded, while nobody holds; None: forgets it, the update is off."""
        ...


class ModuleEngine:
    """An engine of a module's parameters and persistent buffers, or of a mapping of names to tensors.

    standby: a second copy of the tensors takes a version while the first serves; without it versions are written in
    place, and holds wait for the whole update. commit: ``swap`` exchanges the memory of the two by ``.data``, so that
    Parameter objects and ties stay; ``copy`` copies, for engines that remember addresses. A tensor is always copied
    whose memory has gaps, or is something else's too (but for ties): a view's, a state_dict's, that of FSDP2. So are
    small ones of which there are many, and the few that a delta changes.

    Subclasses may look at, or change, the tensors in `load`: they are those of `standby`.
    """

    def __init__(self, module: nn.Module | Mapping[str, Tensor], *, standby: bool = True, commit: str = "swap") -> None:
        """Raises `UsageError` for an argument of another kind."""
        if not isinstance(module, nn.Module | Mapping):
            raise UsageError(f"module={module!r}: expected a module, or a mapping of names to tensors")
        if commit not in ("swap", "copy"):
            raise UsageError(f"commit={commit!r}: expected 'swap' or 'copy'")
        self.module = module
        self.standby: dict[str, Tensor] = {}
        """Where the bytes of the next version land, by name: this rank's own parts."""
        self.in_place = not flag(standby, "standby")
        self.mapped = False
        self.overlapping: list[str] = []
        """Names that may have memory in common, other than ties: what is sent to them has to agree."""
        self._swaps = commit == "swap"
        self._holdings = Holdings()
        self._alone: set[str] = set()
        self._small = SmallTensors({}, ())
        self._copies = False  # small tensors: they lie in memory that this engine has made, and nobody else sees
        self._ours: set[str] = set()  # names whose memory this engine has made
        self._loaded: list[str] = []
        self._pointers: tuple[int, ...] = ()  # of the standby's tensors, if they are known
        self._files: list[Exposed] = []  # in which versions land, by turns
        self._spans: list[tuple[int, int]] = []  # of all of them that there were
        self._suits: tuple[int, Mapping[str, Place], bool] = 0, {}, False  # what `expose` has looked at

    @property
    def takes_any(self) -> bool:
        """True if `load` looks at nothing."""
        return getattr(self.load, "__func__", None) is ModuleEngine.load

    @property
    def standby_key(self) -> tuple[int, ...]:
        """Equal where the standby's tensors lie as before."""
        if not (self._pointers and self.takes_any):
            self._pointers = tuple(map(torch.Tensor.data_ptr, self.standby.values()))
        return self._pointers

    def declare(self, shard: Sharding | None) -> None:
        """What cannot be seen of the module; called by the `Receiver`, at all ranks of its side.

        One of FSDP2, whose state_dict shards it again, is looked at here: the next forward pass gathers on all ranks.
        """
        self._holdings = Holdings(shard)
        modules = self.module.modules() if isinstance(self.module, nn.Module) else ()
        if any(each._state_dict_pre_hooks for each in modules):
            with suppress(UsageError):
                self.look()

    def layout(self) -> Layout:
        """What this rank holds, by looking at the module."""
        layout = self.look().layout
        assert layout is not None
        return layout

    def look(self) -> Holdings:
        """This rank's tensors as they are now."""
        holdings, before = self._holdings, self._holdings.local
        if holdings.look(self.module):
            assert holdings.layout is not None
            same = {
                n for n in self._ours if n in before and n in holdings.local and _same(before[n], holdings.local[n])
            }
            self._ours = same
            self.overlapping = overlapping(holdings.local, holdings.layout.ties)
            free = same | alone(holdings.local, holdings.layout.ties)
            self._small, self._copies = SmallTensors(holdings.local, free - set(holdings.layout.ties)), False
            self._alone = free if self._swaps else set()
            kept = {name: self.standby[name] for name in same & set(self.standby)}
            self.standby, self._pointers = dict(holdings.local) if self.in_place else kept, ()
        return holdings

    @property
    def unchanged(self) -> bool:
        """True if `look` would find what it found before."""
        return type(self).layout is ModuleEngine.layout and self._holdings.unchanged(self.module)

    @property
    def description(self) -> tuple[str, str]:
        """The signature and the text of what `look` found."""
        return self._holdings.signature, self._holdings.text

    def adopt(self, file: File, places: Mapping[str, Place]) -> None:
        """A published copy is to be shown next, and let go with the version after it."""
        self.land(file, places)
        self.mapped = True

    def expose(self, places: Mapping[str, Place], nbytes: int) -> Exposed | None:
        """Memory that sources may write a version to, of which nothing is shown; None: it must land elsewhere.

        places: of the tensors that are loaded, each of which must be without gaps and free to be exchanged.
        """
        looks, local = self._holdings.looks, self._holdings.local
        if self._suits[0] != looks or self._suits[1] is not places:
            suits = all(n in self._alone and local[n].is_contiguous() and local[n].device.type == "cpu" for n in places)
            self._suits = looks, places, suits
        if self.in_place or not self.takes_any or not self._suits[2]:
            return None
        shown = self._holdings.pointers
        self._files = [each for each in self._files if each.fresh and each.bytes.nbytes == nbytes]
        free = next((each for each in self._files if not each.holds(shown)), None)
        if free is None:
            self.standby, self._pointers = {}, ()
            free = Exposed(nbytes)
            self._files.append(free)
            self._spans.append((free.bytes.data_ptr(), free.bytes.data_ptr() + nbytes))
        return free

    def land(self, file: File, places: Mapping[str, Place]) -> None:
        """The next version lands in this memory."""
        self.standby, self._pointers = file.landing(places, self._holdings.local, self._holdings.looks)

    def withdraw(self, file: Exposed) -> None:
        """This memory is not written to, or exposed, again."""
        self._files = [each for each in self._files if each is not file]
        if file.holds(self.standby_key):
            self.standby, self._pointers = {}, ()

    @property
    def free(self) -> set[str]:
        """The names whose memory is no other's of this model, but for ties."""
        return self._alone

    @property
    def seen_elsewhere(self) -> set[str]:
        """Those of them whose memory something else has too, and would keep."""
        return self._holdings.seen_elsewhere(self._alone - self._ours)

    @property
    def live(self) -> dict[str, Tensor]:
        """The tensors that serve, by name: this rank's own parts."""
        return self._holdings.local

    def begin(self) -> None:
        """An update begins; the one before may have ended in `commit`."""
        self._loaded = []

    def prepare(self, names: Collection[str]) -> None:
        """Makes `standby` hold these names, which lie in this order."""
        if len(self.standby) == len(self._holdings.local) or all(map(self.standby.__contains__, names)):
            return
        local = self._holdings.local
        with torch.inference_mode(False):
            made = self.standby | fresh_like({name: local[name] for name in names if name not in self.standby})
        self.standby, self._pointers = {name: made[name] for name in local if name in made}, ()

    def load(self, bucket: Mapping[str, Tensor]) -> None:
        """Nothing to do: the tensors are those of `standby`."""

    def arrived(self, names: Iterable[str]) -> None:
        """These names were loaded, whatever a subclass does in `load`; called by the `Receiver`."""
        self._loaded += names

    def commit(self, version: int | None) -> None:
        """Shows what was loaded, or forgets it."""
        loaded, self._loaded = self._loaded, []
        if version is None:
            return
        if self._holdings.gathered:
            named_tensors(self.module)  # shards again, for what was gathered is of the version before
        if self.in_place:
            return
        with torch.inference_mode(False), torch.no_grad():
            if self._copies and not self.mapped:
                small, loaded = self._divided(loaded)
                here = Memory(self._holdings.local, self._holdings.pointers)
                self._small.copy(small, Memory(self.standby, self.standby_key), here)
            copied = self._copied(loaded) if loaded else set()
            self._exchange([name for name in loaded if name not in copied] if copied else loaded)
            for name in copied:
                self._holdings.local[name].copy_(self.standby[name])
            if self._small.names and not self._copies:
                self._copies = self._own(self._small.names)

    def _own(self, names: Collection[str]) -> bool:
        """True if these tensors lie in memory that this engine has made, and nobody else sees: no child, no source."""
        if self.mapped or not self._ours.issuperset(names):
            return False
        places = [self._holdings.local[name].data_ptr() for name in names]
        return not any(start <= place < end for start, end in self._spans for place in places)

    def _divided(self, names: list[str]) -> tuple[list[str], list[str]]:
        """The small ones of some names, and the others."""
        small = self._small.names
        if len(small) == len(self._holdings.local):
            return names, []
        return [name for name in names if name in small], [name for name in names if name not in small]

    def _copied(self, loaded: list[str]) -> set[str]:
        """Those of the names to which a version is copied: few of all, or with memory that is not the engine's."""
        live = self._holdings.local
        few = len(loaded) < len(self.standby) and sum(live[name].nbytes for name in loaded) <= _FEW
        if few and self._own(loaded):
            return set(loaded)  # what is bound to the memory of all tensors stays so
        copied = set() if self._all_in(self._alone, loaded) else set(loaded) - self._alone
        if not self._all_in(self._ours, loaded):
            copied |= self.seen_elsewhere & set(loaded)
        return copied

    def _all_in(self, some: set[str], names: list[str]) -> bool:
        """True if all of these names are in some of the replica's."""
        return len(some) == len(self._holdings.local) or some.issuperset(names)

    def _exchange(self, names: list[str]) -> None:
        """The memory of some tensors and of those tied to them; that which the model came with is given back."""
        if not names:
            return
        holdings = self._holdings
        assert holdings.layout is not None
        own, live, standby = holdings.own, holdings.local, self.standby
        if len(names) == len(live) == len(standby) and (self.mapped or len(self._ours) == len(live)):
            for tensor, memory in zip(own.values(), standby.values(), strict=True):  # both in the model's order
                tensor.data = memory
            had = holdings.exchanged(Memory(standby, self.standby_key))
            self.standby, self._pointers = ({}, ()) if self.mapped else had
            self._ours.update(names)
            return
        for name in names:
            own[name].data = standby[name]
        live, exchanged = dict(live), set(names)
        for name in names:
            memory, before = standby.pop(name), live[name]
            live[name] = memory
            if name in self._ours and not self.mapped:
                standby[name] = before
        self.standby, self._pointers = {name: standby[name] for name in live if name in standby}, ()
        for other, first in holdings.layout.ties.items():
            if first in exchanged:
                own[other].data = live[other] = live[first]
        self._ours.update(names)
        holdings.moved(live)


def _same(one: Tensor, other: Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
        other.data_ptr(),
        other.shape,
        other.stride(),
        other.dtype,
    )


def as_engine(engine: Any, shard: Sharding | None) -> Any:
    """The engine of a `Receiver`'s argument. Raises `UsageError` if it is none."""
    if isinstance(engine, nn.Module | Mapping):
        engine = ModuleEngine(engine)
    if isinstance(engine, ModuleEngine):
        engine.declare(shard)
    elif not isinstance(engine, Engine):
        raise UsageError(
            f"a receiver needs a module, a mapping of names to tensors, or an engine with layout, load and commit; got "
            f"{type(engine).__name__}"
        )
    return engine

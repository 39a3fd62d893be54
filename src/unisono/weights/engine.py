"""Engines: what a replica does with the tensors of a version. Three methods; `ModuleEngine` has them for a module."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.weights.holdings import Holdings, alone, fresh_like
from unisono.weights.layout import Layout, Sharding

__all__ = ["Engine", "ModuleEngine", "as_engine"]


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
        """Shows what was loaded, or forgets it."""
        loaded, self._loaded = self._loaded, {}
        if version is None or self.in_place:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._exchange([name for name in loaded if name in self._alone])
            for name in loaded:
                if name not in self._alone:
                    self._holdings.local[name].copy_(self.standby[name])

    def _exchange(self, names: list[str]) -> None:
        """The memory of some tensors and of those tied to them; that which the model came with is given back."""
        holdings = self._holdings
        assert holdings.layout is not None
        own, live, standby = holdings.own, holdings.local, self.standby
        for name in names:
            own[name].data = standby[name]
        if len(names) == len(live) == len(standby) == len(self._ours):
            self.standby = live
            holdings.moved(standby)
            return
        live, exchanged = dict(live), set(names)
        for name in names:
            memory, before = standby.pop(name), live[name]
            live[name] = memory
            if name in self._ours:
                standby[name] = before
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

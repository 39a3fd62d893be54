"""A source's own tensors, looked at anew only where they have changed: that is asked at every update, of thousands."""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain, count
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.transport.shared_heap import BOUNDS
from unisono.transport.shared_tensor import empty
from unisono.weights.inspection import inspect, is_dtensor, local_tensors, named_tensors
from unisono.weights.layout import Layout
from unisono.weights.patterns import some
from unisono.weights.prefetch import Prefetch
from unisono.weights.sharding import Sharding

__all__ = ["Holdings", "Memory", "alone", "fresh_like", "overlapping", "signature_of", "starts_of"]


_looks = count()


class Memory(NamedTuple):
    """Tensors by name, and where they begin."""

    tensors: dict[str, Tensor]
    pointers: tuple[int, ...]


class Holdings:
    """What `look` found last: the tensors, this rank's own parts of them (local), and their description."""

    def __init__(self, shard: Sharding | None = None) -> None:
        self._shard = shard
        self._source: Any = None
        self._places: list[tuple[dict[str, Any], int]] = []
        self._keys: list[str] = []
        self._objects: list[Any] = []
        self.pointers: tuple[int, ...] = ()
        """Where the tensors begin."""
        self._lengths: list[Any] = []
        self._guards: Any = None
        self._prefetch = Prefetch()
        self._shared: bool | None = None
        self.named: dict[str, Tensor] = {}
        self.own: dict[str, Tensor] = {}
        """The same, of a DTensor the tensor that has this rank's memory."""
        self.local: dict[str, Tensor] = {}
        self.layout: Layout | None = None
        self.text = self.signature = ""
        self._gathers = False
        self.looks = 0
        """Numbers what was looked at: equal as long as tensors have no memory but that which an engine gave them."""

    @property
    def key(self) -> tuple[int, ...]:
        """Equal for tensors that lie as before, of a source, which has no other memory without a look."""
        return (self.looks,)

    def look(self, source: Any) -> bool:
        """Looks at a source; returns True if its tensors, or their memory, are others than before.

        Raises as `layout` does, and `UsageError` for meta tensors.
        """
        if self.unchanged(source):
            return False
        named = named_tensors(source)
        self.layout = inspect(source, shard=self._shard)
        self.local = local_tensors(named)
        freed = [name for name, tensor in self.local.items() if _freed(tensor)]
        if freed:
            self.layout = None  # to be looked at again
            raise UsageError(f"{some(freed)}: no memory, the storage was freed (offloaded, asleep): give it back first")
        meta = next((name for name, tensor in self.local.items() if tensor.is_meta), None)
        if meta is not None:
            raise UsageError(f"{meta} is a meta tensor, without memory: give the model some, by `to_empty` for one")
        self.named, self._source = named, source
        self._places = [(each, len(each)) for each in _slots(source)]
        self._keys = [key for each, _ in self._places for key in each]
        self._objects = [value for each, _ in self._places for value in each.values()]
        self._gathers = isinstance(source, nn.Module) and any(map(is_dtensor, self._objects))
        self._remember()
        self.text = self.layout.to_text()
        self.signature = signature_of(self.text)
        return True

    @property
    def shared(self) -> bool:
        """True if any of the tensors lies where other processes can read it."""
        if self._shared is None:
            low, high = BOUNDS
            self._shared = bool(high) and any(low <= pointer < high for pointer in self.pointers)
        return self._shared

    def seen_elsewhere(self, names: Collection[str]) -> set[str]:
        """Those of some names whose memory something else has too, which would keep it if it were exchanged.

        A view, a tensor of a state_dict, the flat one by which FSDP2 gathers. Of each storage the users are counted.
        """
        storages = {name: tensor.untyped_storage() for name, tensor in self.local.items()}
        known = Counter(storage._cdata for storage in storages.values())
        objects = {id(tensor): storages[name]._cdata for name, tensor in self.own.items()}
        known.update(objects.values())
        return {
            name
            for name in names
            if torch._C._storage_Use_Count(storages[name]._cdata)
            > known[storages[name]._cdata] + 1  # its Python object
        }

    def like(self, local: Mapping[str, Tensor]) -> "Holdings":
        """The same, of other memory."""
        made = Holdings(self._shard)
        made.layout, made.text, made.signature = self.layout, self.text, self.signature
        made.local = dict(local)
        made.pointers, made.looks = tuple(map(Tensor.data_ptr, local.values())), next(_looks)
        return made

    def moved(self, local: Mapping[str, Tensor]) -> None:
        """The tensors have other memory now, which this rank has given them."""
        self.local = dict(local)
        self.pointers = tuple(map(Tensor.data_ptr, self.own.values()))

    def exchanged(self, other: "Memory") -> "Memory":
        """All tensors have other memory now, and no names are tied; returns what they had."""
        before = Memory(self.local, self.pointers)
        self.local, self.pointers = other
        return before

    def _remember(self) -> None:
        self.own = {name: _own(tensor) for name, tensor in self.named.items()}
        self.pointers = tuple(map(Tensor.data_ptr, self.own.values()))
        self._lengths = self._measured()
        self._guards = _guards_of(list(self.own.values()))
        self._prefetch = Prefetch(self.own.values())
        self._shared = None
        self.looks = next(_looks)

    def _measured(self) -> list[Any]:
        """Strides and numbers of elements, which tell one shape of the same memory from another."""
        tensors = self.own.values()
        return [*map(Tensor.stride, tensors), *map(Tensor.numel, tensors)]

    @property
    def _in_place(self) -> bool:
        """True if the source has the objects that were found."""
        return all(map(is_, chain.from_iterable([each.values() for each, _ in self._places]), self._objects))

    @property
    def gathered(self) -> bool:
        """True if a forward pass of FSDP2 has put whole tensors into the module, in place of its shards.

        These are looked at where they lie: to put them back is for all ranks at once, since the next pass would gather
        on those alone that had.
        """
        if not self._gathers or self._in_place:
            return False
        objects = chain.from_iterable([each.values() for each, _ in self._places])
        pairs = zip(objects, self._objects, strict=True)
        return all(now is own or (is_dtensor(own) and not is_dtensor(now)) for now, own in pairs)

    def unchanged(self, source: Any) -> bool:
        """True if `look` would find what it found before."""
        if self.layout is None or source is not self._source or any(len(each) != count for each, count in self._places):
            return False
        self._prefetch.begin()
        return (
            (self._in_place or self.gathered)
            and [key for each, _ in self._places for key in each] == self._keys
            and tuple(map(Tensor.data_ptr, self.own.values())) == self.pointers
            and (
                (self._guards is not None and self._guards.check(*self.own.values()))
                or self._measured() == self._lengths
            )
        )


def _guards_of(tensors: Sequence[Tensor]) -> Any:
    """What says in one call that tensors have the sizes and strides that they have now; None where torch lacks it.

    It may fail for other reasons, such as another mode of autograd.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards  # as compiled code checks its inputs

        made: Any = TensorGuards
        sizes, strides = ([list(each(tensor)) for tensor in tensors] for each in (Tensor.size, Tensor.stride))
        return made(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except (ImportError, TypeError, RuntimeError):
        return None


def _own(tensor: Any) -> Tensor:
    """The tensor whose memory this rank has: the local one of a DTensor."""
    local: Tensor | None = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local


def _slots(source: Any) -> list[dict[str, Any]]:
    """The dictionaries in which a source keeps its tensors and sub-modules."""
    if not isinstance(source, nn.Module):
        return [source]
    found: list[dict[str, Any]] = []
    for module in source.modules():
        found += [each for each in (module._parameters, module._buffers, module._modules) if each]
    return found


def starts_of(tensors: Mapping[str, Tensor]) -> tuple[dict[str, int], int]:
    """Where tensors that leave no gaps lie if they follow each other in one piece of memory, and its bytes."""
    starts, end = {}, 0
    for name, tensor in tensors.items():
        if tensor.numel() and _dense(tensor):
            align = 64 if tensor.nbytes >= 4096 else 16
            starts[name] = -(-end // align) * align
            end = starts[name] + tensor.nbytes
    return starts, end


def fresh_like(tensors: Mapping[str, Tensor], shared: bool = False) -> dict[str, Tensor]:
    """Tensors of the same shapes, dtypes and strides, one after the other in one piece of memory if without gaps.

    ``shared``: memory that other processes of the host can read.
    """
    starts, nbytes = starts_of(tensors)
    device = next(iter(tensors.values())).device if tensors else None
    make = empty if shared else partial(torch.empty, device=device)
    memory = make(nbytes, dtype=torch.uint8)
    made = {}
    for name, tensor in tensors.items():
        if name in starts:
            flat = memory[starts[name] : starts[name] + tensor.nbytes].view(tensor.dtype)
            made[name] = flat.as_strided(tensor.shape, tensor.stride())
        else:
            made[name] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made


def _freed(tensor: Tensor) -> bool:
    """True for elements beyond the end of the storage."""
    if tensor.is_meta or not tensor.numel():
        return False
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.untyped_storage().nbytes() < (int(tensor.storage_offset()) + int(last) + 1) * tensor.itemsize


def _dense(tensor: Tensor) -> bool:
    """True if the elements fill one run of memory, each at a place of its own."""
    order = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, length in order:
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True


def alone(tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> set[str]:
    """The names whose memory has no gaps, and is none of another name's but for ties, or of another process's.

    It may be exchanged unless something else has it too, as `Holdings.seen_elsewhere` finds. That of torch's inference
    tensors may not: they would be none in a forward pass.
    """
    common = set(overlapping(tensors, ties))
    return {
        name
        for name, tensor in tensors.items()
        if ties.get(name, name) not in common
        and _dense(tensor)
        and not tensor.is_inference()
        and not (tensor.device.type == "cpu" and tensor.untyped_storage().is_shared())
    }


def overlapping(tensors: Mapping[str, Tensor], ties: Mapping[str, str]) -> list[str]:
    """The names whose memory may, at least in part, be another's too, other than by a tie."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and name not in ties:
            last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
            start = int(tensor.storage_offset()) * tensor.itemsize
            span = start, start + (int(last) + 1) * tensor.itemsize, name
            spans.setdefault(tensor.untyped_storage()._cdata, []).append(span)
    found: dict[str, None] = {}
    for each in spans.values():
        end, before = -1, ""
        for start, stop, name in sorted(each):
            if start < end:
                found |= {before: None, name: None}
            if stop > end:
                end, before = stop, name
    return list(found)


def signature_of(text: str) -> str:
    """A digest of a description."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

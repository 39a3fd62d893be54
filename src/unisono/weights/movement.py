"""The movement of an update between the ranks of one host: sources pack, targets read, checksums beside the bytes.

Every source has two pieces of memory that its peers map: the bucket (windows.py) and a *table*, two numbers per item:

    place       PACKED: in the bucket; UNCHANGED: not sent, the replica has it; else where it lies in the source's heap
    checksum    of the item's bytes, as a share of that of its whole tensor

In step k all sources pack their k-th window, all ranks meet, the targets read. What lies in shared memory already is
read there; then, and in a delta, tables go ahead of the data.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from unisono.backend.private import peer_memory
from unisono.transport.shared_heap import BOUNDS, place
from unisono.transport.shared_tensor import empty
from unisono.weights.checksum import rows_of, sums_of_rows
from unisono.weights.lineup import Lineup
from unisono.weights.packing import Move, Packer, view_of
from unisono.weights.scales import local_maxima, scales_of
from unisono.weights.windows import WINDOW, Item, Window, cut_move, windows_of

__all__ = [
    "PACKED",
    "UNCHANGED",
    "Bound",
    "GroupFailed",
    "Movement",
    "Numbers",
    "Packing",
    "Source",
    "Terms",
    "call",
    "rebased",
]

PACKED, UNCHANGED = -1, -2
_KEPT = 2  # bindings: to the model and to a snapshot, or to two standbys

T = TypeVar("T")
Numbers = NDArray[np.int64]


class GroupFailed(Exception):
    """A call of the group failed: the sign of something that went wrong at some rank."""


class Terms(NamedTuple):
    """What the ranks have agreed on for one update: whether tables go first, what is checked, until when."""

    tables: bool
    checksum: bool
    deadline: float


def call(group: Any, what: str, *given: Any, seconds: float = 0.0) -> None:
    """A small collective of the group. Raises `GroupFailed`."""
    try:
        if what == "gather":
            group.allgather([given[0]], [given[1]]).wait()
        elif what == "meet":
            options = dist.BarrierOptions()
            options.asyncOp = False
            options.timeout = timedelta(seconds=max(seconds, 0.0) + 0.5)
            group.barrier(options)
        else:
            chosen = dist.AllreduceOptions()
            chosen.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN if what == "least" else dist.ReduceOp.MAX)
            group.allreduce([given[0]], chosen).wait()
    except RuntimeError as error:
        raise GroupFailed(f"{type(error).__name__}: {error}") from error


class Bound(Generic[T]):
    """Things made for tensors where they lie, kept while they may lie there again."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], T] = {}

    def of(self, tensors: Mapping[str, Tensor], make: Callable[[], T]) -> T:
        """What was made for these tensors, or is now."""
        key = tuple(map(Tensor.data_ptr, tensors.values()))
        if key not in self._kept:
            while len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = make()
        return self._kept[key]


class Movement:
    """One rank's part in the movement of all updates of a line-up: what sources and targets share."""

    def __init__(self, lineup: Lineup, group: Any, limit: int = WINDOW) -> None:
        """``limit``: bytes of a window. Collective. Raises `GroupFailed`."""
        self.lineup, self.plan, self.group, self.rank = lineup, lineup.plan, group, lineup.rank
        self.windows = [windows_of(self.plan, lineup.layout_of, source, limit) for source in range(lineup.senders)]
        self.source = Source(self, self.windows[self.rank], self.memory) if lineup.sends else None
        self.tables: dict[int, Numbers] = {}
        self.heaps: dict[int, Tensor] = {}
        self.prepare()

    def memory(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Memory for a source's bucket and table."""
        return empty(*size, dtype=dtype)

    def prepare(self) -> None:
        """Maps what the sources have."""
        lineup, group = self.lineup, self.group
        self.buckets: dict[int, Tensor] = {}
        places = torch.tensor(self.source.places() if self.source else [-1, -1])
        everyone = [torch.empty(2, dtype=torch.int64) for _ in lineup.who]
        call(group, "gather", everyone, places)
        mapped = [self._map(source, *everyone[source].tolist()) for source in range(lineup.senders)]
        least = torch.tensor([int(False not in mapped)])
        call(group, "least", least)
        self.shared = bool(least[0])
        """True if all ranks can read what the sources have; else data goes through the group."""

    def _map(self, source: int, bucket: int, table: int) -> bool:
        windows = self.windows[source]
        if not windows:
            return True
        if bucket < 0 or table < 0:
            return False
        if source == self.rank:
            assert self.source is not None
            self.buckets[source], self.tables[source] = self.source.bucket, self.source.table
            return True
        heap = peer_memory(self.group, source)
        if heap is None:
            return False
        half, count = half_of(windows), windows[-1].stop
        self.heaps[source] = heap
        self.buckets[source] = heap[bucket : bucket + 2 * half].view(2, half)
        self.tables[source] = heap[table : table + 16 * count].view(torch.int64).view(count, 2).numpy()
        return True

    def meet(self, terms: Terms) -> None:
        """All ranks come here."""
        call(self.group, "meet", seconds=terms.deadline - time.monotonic())

    def steps(self, terms: Terms) -> list[list[Window]]:
        """The windows that each source packs, as all ranks see it."""
        if not terms.tables:
            return self.windows
        packed = {source: table[:, 0] == PACKED for source, table in self.tables.items()}
        return [
            [window for window in windows if packed[source][window.first : window.stop].any()]
            for source, windows in enumerate(self.windows)
        ]

    def hand_over(self, source: "Source", packing: "Packing", terms: Terms, summing: bool) -> None:
        """Packs a source's windows, for the targets to read; ``summing``: checksums are not in the table yet."""
        summing = summing and terms.checksum
        if terms.tables:
            self.meet(terms)
        steps = self.steps(terms)
        own = steps[self.rank]
        for step in range(max(map(len, steps), default=0)):
            if step < len(own):
                source.pack(own[step], packing, source.bucket[step & 1], summing)
            self.meet(terms)
        if terms.tables:
            if summing:
                source.finish(packing)
            self.meet(terms)

    def fetch(self, target: Any, reader: Any, terms: Terms) -> None:
        """Reads a target's windows."""
        if terms.tables:
            self.meet(terms)
        steps = self.steps(terms)
        if terms.tables:
            reader.begin(steps)
        for step in range(max(map(len, steps), default=0)):
            self.meet(terms)
            for source, windows in enumerate(steps):
                key = (source, windows[step].number) if step < len(windows) else None
                if key in target.windows:
                    reader.take(key, self.buckets[source][step & 1])
        if terms.tables:
            self.meet(terms)

    def scales(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The scales of quantised tensors for each replica; collective if there are any and several senders."""
        found = []
        for fit in self.plan.fits:
            if fit.scales and self.lineup.sends:
                maxima = local_maxima(fit, self.plan.sender, self.rank, tensors)
            else:
                maxima = torch.zeros(sum(scale.length for scale in fit.scales.values()))
            if fit.scales and self.lineup.senders > 1:
                call(self.group, "largest", maxima)
            found.append(scales_of(fit, maxima) if self.lineup.sends else {})
        return found


def half_of(windows: Sequence[Window]) -> int:
    """Bytes of half of the bucket for these windows."""
    return max(-(-max(window.nbytes for window in windows) // 64) * 64, 64)


class Packing(NamedTuple):
    """A source's windows bound to its tensors: how each is packed, and where items lie as they are sent, else 0."""

    packers: list[Packer]
    addresses: Numbers
    some: Callable[[Window, NDArray[np.bool_]], Packer]


class Source:
    """What a rank that sends does."""

    def __init__(self, movement: Movement, windows: list[Window], memory: Callable[..., Tensor]) -> None:
        self._movement, self.windows = movement, windows
        self.items: list[Item] = [item for window in windows for item in window.items]
        self._nbytes = np.array([item.nbytes for item in self.items], dtype=np.int64)
        self._starts = np.array([item.start for item in self.items], dtype=np.int64)
        self._itself = np.arange(len(self.items))
        self.bucket = memory(2, half_of(windows) if windows else 0, dtype=torch.uint8)
        raw = memory(len(self.items), 2, dtype=torch.int64)
        raw[:, 0], raw[:, 1] = PACKED, 0
        self.table: Numbers = raw.numpy()
        self._raw = raw
        self._bound: Bound[Packing] = Bound()
        rows: list[list[int]] = []
        owners: list[int] = []
        for window in windows:
            layout = movement.lineup.layout_of(self._targets(window)[0])
            for number, item in enumerate(window.items, window.first):
                tensor = layout[item.name]
                more = rows_of(item.start, item.offsets, item.shape, tensor.shape, tensor.dtype.itemsize)
                rows += more
                owners += [number] * len(more)
        self._rows: Numbers = np.array(rows, dtype=np.int64).reshape(-1, 11)
        self._owners: Numbers = np.array(owners, dtype=np.int64)
        self._bounds = np.searchsorted(self._owners, np.arange(len(self.items) + 1))

    def places(self) -> list[int]:
        """Where the bucket and the table lie in this process's heap; -1: not there."""
        if not self.windows:
            return [-1, -1]
        table = place(self._raw.data_ptr(), self._raw.nbytes)
        return [place(self.bucket.data_ptr(), self.bucket.nbytes), table]

    def _targets(self, window: Window) -> tuple[int, ...]:
        return self._movement.plan.chunks[window.chunk].targets

    def send(self, tensors: Mapping[str, Tensor], terms: Terms, compare: Any = None) -> None:
        """Hands the items over. ``compare(checksums)``: which of them are not sent (delta)."""
        scales = self._movement.scales(tensors)
        if any(scales):
            packing = self._bind(tensors, scales)
        else:
            packing = self._bound.of(tensors, lambda: self._bind(tensors, scales))
        self.table[:, 0] = PACKED
        if terms.tables:
            self._publish(packing, compare)
        self._movement.hand_over(self, packing, terms, compare is None)

    def finish(self, packing: "Packing") -> None:
        """Sums what the targets read where it lies."""
        self.sum(np.flatnonzero(self.table[:, 0] >= 0), packing.addresses)

    def _bind(self, tensors: Mapping[str, Tensor], scales: list[dict[str, Tensor]]) -> Packing:
        plan, lineup = self._movement.plan, self._movement.lineup
        addresses: list[int] = []
        cuts: list[list[Move]] = []
        moves, chunk = list[Move](), -1
        for window in self.windows:
            if window.chunk != chunk:
                moves, chunk = plan.moves(self._movement.rank, window.chunk), window.chunk
            cuts.append([cut_move(moves[item.piece], item) for item in window.items])
            addresses += [_address(move, tensors) for move in cuts[-1]]

        def some(window: Window, wanted: NDArray[np.bool_]) -> Packer:
            chosen = [move for move, each in zip(cuts[window.number], wanted, strict=True) if each]
            return Packer(rebased(chosen), tensors, scales[lineup.replica_of(self._targets(window)[0])])

        packers = [some(window, np.ones(len(window.items), dtype=np.bool_)) for window in self.windows]
        return Packing(packers, np.array(addresses, dtype=np.int64), some)

    def _publish(self, packing: Packing, compare: Any) -> None:
        """Writes the table as far as it goes ahead of the data."""
        table, addresses = self.table, packing.addresses
        inside = (addresses >= BOUNDS[0]) & (addresses + self._nbytes <= BOUNDS[1]) & (addresses > 0)
        table[:, 0] = np.where(inside, addresses - BOUNDS[0], PACKED)
        if compare is not None:
            self.sum_all(packing)
            table[compare(table[:, 1]), 0] = UNCHANGED

    def pack(self, window: Window, packing: Packing, bucket: Tensor, summing: bool) -> int:
        """Packs what of a window goes through the bucket, without gaps; returns how many bytes that is."""
        packed = self.table[window.first : window.stop, 0] == PACKED
        items = self._itself[window.first : window.stop]
        if packed.all():
            packing.packers[window.number].pack(bucket)
            starts, nbytes = self._starts, window.nbytes
        else:
            packer = packing.some(window, packed)
            packer.pack(bucket)
            items, nbytes = items[packed], packer.nbytes
            starts = np.zeros_like(self._starts)
            starts[items] = np.cumsum(self._nbytes[items]) - self._nbytes[items]
        if summing:
            self.sum(items, bucket.data_ptr() + starts)
        return nbytes

    def sum_all(self, packing: Packing) -> None:
        """Sums everything ahead of the data; what is not sent as it lies is packed for that."""
        addresses = packing.addresses
        self.sum(np.flatnonzero(addresses > 0), addresses)
        for window in self.windows:
            if not (addresses[window.first : window.stop] > 0).all():
                packing.packers[window.number].pack(self.bucket[0])
                items = self._itself[window.first : window.stop]
                self.sum(items, self.bucket[0].data_ptr() + self._starts)

    def sum(self, items: Numbers, addresses: Numbers) -> None:
        """Writes the checksums of items, in order, which lie at ``addresses`` (of all items), into the table."""
        if not len(items):
            return
        first, last = items[0], items[-1]
        rows, owners = self._rows_of(first, last + 1)
        if len(items) != last - first + 1:
            wanted = np.isin(owners, items)
            rows, owners = rows[wanted], owners[wanted]
        rows = rows.copy()
        rows[:, 0] += (addresses - self._starts)[owners]
        total = np.zeros(last - first + 1, dtype=np.uint64)
        np.add.at(total, owners - first, sums_of_rows(rows))
        self.table[items, 1] = total[items - first].view(np.int64)

    def _rows_of(self, first: int, stop: int) -> tuple[Numbers, Numbers]:
        low, high = self._bounds[first], self._bounds[stop]
        return self._rows[low:high], self._owners[low:high]


def rebased(moves: Sequence[Move]) -> list[Move]:
    """Moves that follow each other without gaps."""
    found, start = [], 0
    for move in moves:
        found.append(move if move.start == start else move._replace(start=start))
        start += move.nbytes
    return found


def _address(move: Move, tensors: Mapping[str, Tensor]) -> int:
    """Where a move's bytes lie as they are sent; 0 if nowhere."""
    if move.ops or move.name not in tensors:
        return 0
    view = view_of(move, tensors[move.name])
    plain = view.is_contiguous() and view.device.type == "cpu" and not (view.is_conj() or view.is_neg())
    return view.data_ptr() if plain else 0

"""The movement of an update between the ranks of one host: sources pack, targets read, checksums beside the bytes.

Every source has two pieces of memory that its peers map: the bucket (windows.py) and a *table*, two numbers per item:

    place       PACKED: in the bucket; UNCHANGED: not sent, the replica has it; else where it lies in the source's heap
    checksum    of the item's bytes, as a share of that of its whole tensor

In step k all sources pack their k-th window, and the targets read it. All ranks meet after some steps (`rounds`), so
that sources pack while targets read, and a rank that has lost its core is seldom waited for. What lies in shared memory
already is read there; then, and in a delta, tables go ahead of the data. Where each target's bytes are its alone, and
targets expose memory for it (exposed.py), windows are put where they are wanted, in one pass without a bucket, and
targets sum what has landed behind that.
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unisono.backend.private import peer_memory
from unisono.transport.shared_tensor import empty
from unisono.weights.chunks import Chunk
from unisono.weights.lineup import Lineup
from unisono.weights.prediction import CACHED
from unisono.weights.publishing import Publishing
from unisono.weights.scales import local_maxima, scales_of
from unisono.weights.source import Packing, Source
from unisono.weights.terms import PACKED, SLOTS, Numbers, Terms, call, followed, half_of, rounds, table_in
from unisono.weights.windows import WINDOW, Window, windows_of

__all__ = ["Movement"]

_LEAST = 64 << 10  # bytes of a window that are worth a meeting


class Movement:
    """One rank's part in the movement of all updates of a line-up: what sources and targets share."""

    slots = SLOTS

    def __init__(self, lineup: Lineup, group: Any, limit: int = WINDOW) -> None:
        """``limit``: bytes of a window, at most. Collective. Raises `GroupFailed`."""
        if limit == WINDOW:  # a target maps the buckets of all sources
            limit = min(limit, max(2 * lineup.bucket // (SLOTS * lineup.senders), _LEAST))
        self.lineup, self.plan, self.group, self.rank = lineup, lineup.plan, group, lineup.rank
        self.windows = self._windows(limit, lambda replica: replica not in lineup.mapped)
        self.past = sum(chunk.nbytes for chunk in self.plan.chunks) > CACHED
        """True for more bytes than caches hold: they are stored past them."""
        self.oversubscribed = len(lineup.who) > (os.cpu_count() or 1)
        self.puts = self._may_put()
        """True if targets may expose memory, into which sources put."""
        self.source = Source(self, self.windows[self.rank], self.memory) if lineup.sends else None
        self.publishing = Publishing(self, self._windows(limit, lineup.mapped.__contains__)) if lineup.mapped else None
        self.tables: dict[int, Numbers] = {}
        self.heaps: dict[int, Tensor] = {}
        self.prepare()

    def _windows(self, limit: int, wanted: Callable[[int], bool]) -> list[list[Window]]:
        """The windows of each source of which a target is in a ``wanted`` replica."""
        lineup = self.lineup

        def some(chunk: Chunk) -> bool:
            return any(wanted(lineup.replica_of(target)) for target in chunk.targets)

        return [windows_of(self.plan, lineup.layout_of, source, limit, some) for source in range(lineup.senders)]

    def _may_put(self) -> bool:
        """True if sources may put, and it pays: ranks have a core each, or sources alone keep all cores busy.

        Every chunk must have one target. What a source with a core of its own maps is the replica's model and standby:
        its share is no more than a bucket, to a 32nd. Sources that outnumber cores map these within two buckets,
        together with their own, through which the first version goes.
        """
        sent = [0] * self.lineup.senders
        for chunk in self.plan.chunks:
            sent[chunk.source] += chunk.nbytes
        single = all(len(chunk.targets) == 1 for chunk in self.plan.chunks) and not self.lineup.mapped
        share = max(sent)
        if not self.oversubscribed:
            return single and 0 < share <= self.lineup.bucket + self.lineup.bucket // 32
        own = max((self.slots * half_of(windows) for windows in self.windows if windows), default=0)
        busy = self.lineup.senders >= (os.cpu_count() or 1)
        return single and busy and share > 0 and 2 * share + own <= 2 * self.lineup.bucket

    def exposed(self, bases: list[Any]) -> dict[int, tuple[int, int]]:
        """What all targets expose in this update, descriptor and file; empty if some do not: all ranks see the same."""
        if not self.puts:
            return {}
        found = {rank: base[3] for rank, base in enumerate(bases) if len(base) > 3 and base[3]}
        targets = {target for chunk in self.plan.chunks for target in chunk.targets}
        if not all(found.get(target, [0])[0] == self.lineup.number for target in targets):
            return {}
        return {target: (found[target][1], found[target][2]) for target in targets}

    @cached_property
    def puts_between(self) -> list[list[list[Window]]]:
        """What each source puts between two meetings: targets sum what has landed while the next is put."""
        orders = [self._put_order(source) for source in range(self.lineup.senders)]
        meetings = followed(max(map(len, orders)), self.oversubscribed)
        return [[order[each.start : each.stop] for order in orders] for each in meetings]

    def _put_order(self, source: int) -> list[Window]:
        """A source's windows, those of its targets by turns: what lies side by side in a tensor is read once."""
        turns: dict[int, int] = {}
        keyed = []
        for window in self.windows[source]:
            target = self.plan.chunks[window.chunk].targets[0]
            turns[target] = turns.get(target, 0) + 1
            keyed.append((turns[target], target, window))
        return [window for *_, window in sorted(keyed)]

    def close(self) -> None:
        """Lets go what was made for the line-up."""
        if self.publishing is not None:
            self.publishing.close()

    def memory(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Memory for a source's bucket and table."""
        return empty(*size, dtype=dtype)

    def prepare(self) -> None:
        """Maps what the sources have."""
        lineup, group = self.lineup, self.group
        self.buckets: dict[int, Tensor] = {}
        own = self.source.places() if self.source else [-1, -1]
        more = self.publishing.source.places() if self.publishing and self.publishing.source else [-1, -1]
        everyone = [torch.empty(3, dtype=torch.int64) for _ in lineup.who]
        call(group, "gather", everyone, torch.tensor([*own, more[1]]))
        mapped = [self._map(source, *everyone[source].tolist()) for source in range(lineup.senders)]
        least = torch.tensor([int(False not in mapped)])
        call(group, "least", least)
        self.shared = bool(least[0])
        """True if all ranks can read what the sources have; else data goes through the group."""

    def _map(self, source: int, bucket: int, table: int, published: int) -> bool:
        """Maps what a source has; False if that can not be."""
        heap = None if source == self.rank else peer_memory(self.group, source)
        if self.publishing is not None:
            found = self.publishing.map(source, heap, published)
            if not found:
                return False
        windows = self.windows[source]
        if not windows:
            return True
        if bucket < 0 or table < 0:
            return False
        if source == self.rank:
            assert self.source is not None
            self.buckets[source], self.tables[source] = self.source.bucket, self.source.table
            return True
        if heap is None:
            return False
        half = half_of(windows)
        self.heaps[source] = heap
        self.buckets[source] = heap[bucket : bucket + SLOTS * half].view(SLOTS, half)
        self.tables[source] = table_in(heap, table, windows[-1].stop)
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
        for each in rounds(steps, self.oversubscribed):
            for step in each[: max(len(own) - each.start, 0)]:
                source.pack(own[step], packing, source.bucket[step % SLOTS], summing)
            self.meet(terms)
        if terms.tables:
            if summing:
                source.finish(packing)
            self.meet(terms)

    def fetch_put(self, reader: Any, terms: Terms) -> None:
        """Takes what sources have put."""
        for number in range(len(self.puts_between)):
            self.meet(terms)
            reader.landed(number)

    def pass_steps(self, terms: Terms) -> None:
        """Meets the others where they hand over what is not for this rank."""
        if terms.tables:
            self.meet(terms)
        for _ in range(len(rounds(self.steps(terms), self.oversubscribed)) + terms.tables):
            self.meet(terms)

    def fetch(self, target: Any, reader: Any, terms: Terms) -> None:
        """Reads a target's windows."""
        if terms.tables:
            self.meet(terms)
        steps = self.steps(terms)
        if terms.tables:
            reader.begin(steps)
        for each in rounds(steps, self.oversubscribed):
            self.meet(terms)
            for step in each:
                for source, windows in enumerate(steps):
                    key = (source, windows[step].number) if step < len(windows) else None
                    if key in target.windows:
                        reader.take(key, self.buckets[source][step % SLOTS])
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

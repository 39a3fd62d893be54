"""How the ranks of a line-up make, and find, the copies for mapped replicas (published.py)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unisono.weights.published import Copies, File
from unisono.weights.source import Source
from unisono.weights.terms import GroupFailed, Numbers, Terms, call, rows_in
from unisono.weights.windows import Item, Window

if TYPE_CHECKING:
    from unisono.weights.movement import Movement

__all__ = ["Publishing"]


class Publishing:
    """The copies for mapped replicas (published.py), as all ranks of a line-up make and find them."""

    def __init__(self, movement: "Movement", windows: list[list[Window]]) -> None:
        self._movement, self._windows = movement, windows
        lineup = movement.lineup
        self.source = Source(movement, windows[movement.rank], movement.memory) if lineup.sends else None
        self.tables: dict[int, Numbers] = {}
        self._kinds = [
            number for number in sorted(lineup.mapped) if lineup.kind_of(number) == number
        ]  # a replica of each kind of those that are mapped
        self._copies = {number: Copies(movement.plan.fits[number]) for number in self._kinds}
        self._writes: list[Any] = []

    def map(self, source: int, heap: Tensor | None, table: int) -> bool:
        """Maps a source's table; False if that can not be."""
        windows = self._windows[source]
        if windows and self._movement.rank == source and self.source is not None:
            self.tables[source] = self.source.table
        elif windows:
            if heap is None or table < 0:
                return False
            self.tables[source] = rows_in(heap, table, windows[-1].stop)
        return True

    def publish(self, tensors: Mapping[str, Tensor], scales: Any, terms: Terms, shown: Mapping[int, int]) -> None:
        """At a sender: writes its parts of the copies."""
        movement, source = self._movement, self.source
        assert source is not None
        packing = source.packing(tensors, scales)
        made = {kind: file.tensors(self._copies[kind].places) for kind, file in self._files(shown).items()}
        for window in source.windows:
            packing.packers[window.number].pack(source.bucket[0])
            for kind in {movement.lineup.kind_of(replica) for replica in self._mapped_targets(window)}:
                for item in window.items:
                    into = box_of(made[kind][item.name], item)
                    raw = source.bucket[0][item.start : item.start + item.nbytes].view(into.dtype)
                    into.copy_(raw.view(into.shape))
            if terms.checksum:
                source.sum(np.arange(window.first, window.stop), source.bucket[0].data_ptr() + source.starts)
        movement.meet(terms)

    def _mapped_targets(self, window: Window) -> set[int]:
        lineup = self._movement.lineup
        replicas = {lineup.replica_of(target) for target in self._movement.plan.chunks[window.chunk].targets}
        return replicas & lineup.mapped

    def _files(self, shown: Mapping[int, int]) -> dict[int, File]:
        """This update's files by kind; collective."""
        movement, lineup = self._movement, self._movement.lineup
        places = torch.zeros(2 * len(self._kinds), dtype=torch.int64)
        if movement.rank == 0:
            for at, kind in enumerate(self._kinds):
                ranks = [r for n in lineup.mapped if lineup.kind_of(n) == kind for r in lineup.ranks_of(n)]
                made = self._copies[kind].next(ranks, shown)
                places[2 * at], places[2 * at + 1] = made.fd, made.nonce
        everyone = [torch.empty_like(places) for _ in lineup.who]
        call(movement.group, "gather", everyone, places)
        found = {}
        for at, kind in enumerate(self._kinds):
            fd, nonce = everyone[0][2 * at : 2 * at + 2].tolist()
            if movement.rank == 0:
                found[kind] = self._copies[kind].made(nonce)
            elif lineup.sends or (lineup.replica in lineup.mapped and lineup.kind_of(lineup.replica) == kind):
                try:
                    found[kind] = self._copies[kind].open(lineup.who[0], fd, nonce, lineup.sends)
                except (OSError, ValueError) as error:
                    raise GroupFailed(f"the published copy can not be mapped: {error}") from None
        return found

    def attend(self, terms: Terms) -> None:
        """At a replica that is not mapped: meets the others."""
        self._files({})
        self._movement.meet(terms)

    def fetch(self, terms: Terms) -> tuple[dict[str, Tensor], int]:
        """At a mapped replica: its tensors in the copy, and the number that names it."""
        kind = self._movement.lineup.kind_of(self._movement.lineup.replica)
        file = self._files({}).get(kind)
        self._movement.meet(terms)
        assert file is not None
        return file.tensors(self._copies[kind].places), file.nonce

    def own_share(self) -> tuple[int, int]:
        """This rank's number among those that share its copy, and how many they are."""
        lineup = self._movement.lineup
        kind = lineup.kind_of(lineup.replica)
        ranks = [rank for n in sorted(lineup.mapped) if lineup.kind_of(n) == kind for rank in lineup.ranks_of(n)]
        return ranks.index(lineup.rank), len(ranks)

    def items(self) -> list[tuple[int, Window]]:
        """The windows of all sources."""
        return [(source, window) for source, windows in enumerate(self._windows) for window in windows]

    def close(self) -> None:
        """Lets the copies go."""
        for copies in self._copies.values():
            copies.close()


def box_of(tensor: Tensor, item: Item) -> Tensor:
    """An item's place in the whole tensor."""
    for dim, (at, length) in enumerate(zip(item.offsets, item.shape, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, at, length)
    return tensor

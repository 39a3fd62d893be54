"""The collective whose pre- and postcondition are tables: each chunk has a source, targets and bytes of its own.

    collective       holds chunk c before        must hold chunk c after      bytes of chunk c
    redistribution   sources[c]                  targets[c]                   nbytes[c]

Nothing is reduced. It is what moves a tensor that lies on some ranks in one layout to others in another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UsageError
from unisono.schedule.collectives import Collective

__all__ = ["Redistribution"]


@dataclass(frozen=True, init=False)
class Redistribution(Collective):
    """sources: a rank per chunk; targets: the ranks that must hold it; nbytes: its bytes.

    Raises UsageError if the tables differ in length, name ranks that do not exist or list a source as its own target.
    """

    sources: tuple[int, ...] = ()
    targets: tuple[tuple[int, ...], ...] = ()
    nbytes: tuple[int, ...] = ()

    def __init__(
        self, world_size: int, sources: Sequence[int], targets: Sequence[Sequence[int]], nbytes: Sequence[int]
    ) -> None:
        values = {
            "name": "redistribution",
            "world_size": int(world_size),
            "num_chunks": len(sources),
            "root": 0,
            "sources": tuple(map(int, sources)),
            "targets": tuple(tuple(map(int, ranks)) for ranks in targets),
            "nbytes": tuple(map(int, nbytes)),
        }
        for key, value in values.items():
            object.__setattr__(self, key, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise UsageError(f"redistribution needs at least 1 rank, got world_size={self.world_size}")
        if not len(self.sources) == len(self.targets) == len(self.nbytes):
            raise UsageError(
                f"redistribution needs tables of one length, got {len(self.sources)} sources, {len(self.targets)} "
                f"targets, {len(self.nbytes)} nbytes"
            )
        for chunk, (source, ranks, nbytes) in enumerate(zip(self.sources, self.targets, self.nbytes, strict=True)):
            unknown = [rank for rank in (source, *ranks) if not 0 <= rank < self.world_size]
            if unknown or source in ranks or len(set(ranks)) < len(ranks) or not ranks or nbytes < 0:
                raise UsageError(
                    f"chunk {chunk} of a redistribution over {self.world_size} ranks: from {source} to {list(ranks)}, "
                    f"{nbytes} bytes; expected other ranks as targets, each once"
                )

    @property
    def pieces(self) -> int:
        """All chunks: no rank owns a fixed share of them."""
        return self.num_chunks

    @property
    def own_nbytes(self) -> int:
        """Bytes of all chunks."""
        return sum(self.nbytes)

    def owner(self, chunk: int) -> int | None:
        """The one target of a chunk, None if it has several."""
        return self.targets[chunk][0] if len(self.targets[chunk]) == 1 else None

    def source(self, chunk: int) -> int:
        """The rank that holds a chunk before."""
        return self.sources[chunk]

    def held_before(self) -> NDArray[np.bool_]:
        """Bool, shape (world_size, num_chunks): the source of each chunk."""
        return self._held_by(list(self.sources))

    def held_after(self) -> NDArray[np.bool_]:
        """Bool, shape (world_size, num_chunks): the targets of each chunk."""
        held = np.zeros((self.world_size, self.num_chunks), dtype=np.bool_)
        for chunk, ranks in enumerate(self.targets):
            held[list(ranks), chunk] = True
        return held

    def nbytes_of(self, chunk: NDArray[np.integer], count: NDArray[np.integer], nbytes: float) -> NDArray[np.float64]:
        """Bytes of chunks chunk .. chunk+count-1, elementwise, if all chunks have `nbytes` bytes together."""
        ends = np.concatenate([[0], np.cumsum(np.array(self.nbytes, dtype=np.float64))])
        scale = nbytes / ends[-1] if ends[-1] else 0.0
        return np.asarray((ends[chunk.astype(np.int64) + count] - ends[chunk]) * scale, dtype=np.float64)

"""Collectives as pre- and postconditions over chunks.

Every rank has one logical buffer with the same chunk ids, 0 .. num_chunks-1. Before the collective some ranks hold a
contribution to a chunk; after it some ranks must hold the sum of all contributions to that chunk, each exactly once.
"Sum" means whatever the reduce op is; a chunk with one contributor is plain data and is only moved.

    collective       contributes to chunk c      must hold chunk c after      chunk ids
    all_reduce       every rank                  every rank                   any number
    barrier          every rank                  every rank                   any number, of zero bytes
    broadcast        root                        every rank                   any number
    reduce           every rank                  root                         any number
    reduce_scatter   every rank                  owner(c)                     pieces per rank: owner = c // pieces
    all_gather       owner(c)                    every rank                   pieces per rank
    gather           owner(c)                    root                         pieces per rank
    scatter          root                        owner(c)                     pieces per rank
    all_to_all       source(c)                   owner(c)                     (source * n + owner) * pieces + piece
    redistribution   sources[c]                  targets[c]                   any number, of nbytes[c] bytes each

This table is the law: verify, simulate, draw and run all consult `Collective`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.errors import UsageError, check_known

__all__ = ["COLLECTIVES", "COMPOSITIONS", "REVERSES", "ROOTED", "Collective", "Redistribution"]

COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)

ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})

# What one collective followed by another amounts to.
COMPOSITIONS = {
    ("reduce_scatter", "all_gather"): "all_reduce",
    ("reduce", "broadcast"): "all_reduce",
    ("reduce", "scatter"): "reduce_scatter",
    ("reduce_scatter", "gather"): "reduce",
    ("scatter", "all_gather"): "broadcast",
    ("gather", "broadcast"): "all_gather",
}

# What a collective becomes when every transfer runs backwards, last step first.
REVERSES = {
    "broadcast": "reduce",
    "all_gather": "reduce_scatter",
    "scatter": "gather",
    "gather": "scatter",
    "all_to_all": "all_to_all",
}

_OWNED = frozenset({"reduce_scatter", "all_gather", "gather", "scatter"})
_ALL_CONTRIBUTE = frozenset({"all_reduce", "barrier", "reduce", "reduce_scatter"})
_ALL_RECEIVE = frozenset({"all_reduce", "barrier", "broadcast", "all_gather"})


@dataclass(frozen=True)
class Collective:
    """The pre- and postcondition of a collective: a name, a number of ranks and chunks, and a root where there is one.

    Raises UsageError if the name is unknown, the root is not a rank, or num_chunks does not divide among the ranks.
    """

    name: str
    world_size: int
    num_chunks: int
    root: int = 0

    def __post_init__(self) -> None:
        check_known("collective", self.name, COLLECTIVES)
        if self.world_size < 1:
            raise UsageError(f"{self.name} needs at least 1 rank, got world_size={self.world_size}")
        if not 0 <= self.root < self.world_size:
            raise UsageError(f"{self.name} over {self.world_size} ranks has no root {self.root}")
        if self.root and not self.rooted:
            raise UsageError(f"{self.name} has no root, got root={self.root}")
        if self.num_chunks < 1 or self.num_chunks % self._groups:
            raise UsageError(
                f"{self.name} over {self.world_size} ranks needs a multiple of {self._groups} chunks, "
                f"got {self.num_chunks}"
            )

    @classmethod
    def of(cls, name: str, world_size: int, pieces: int = 1, root: int = 0) -> "Collective":
        """The collective with `pieces` chunks per rank (per pair for all_to_all, in all where no rank owns a chunk)."""
        groups = {"all_to_all": world_size**2}.get(name, world_size if name in _OWNED else 1)
        return cls(name, world_size, groups * pieces, root)

    @property
    def rooted(self) -> bool:
        """True if one rank plays a part of its own."""
        return self.name in ROOTED

    @property
    def reduces(self) -> bool:
        """True if contributions of several ranks are summed."""
        return self.name in _ALL_CONTRIBUTE

    @property
    def idempotent(self) -> bool:
        """True if a contribution may arrive more than once (only the empty token of a barrier may)."""
        return self.name == "barrier"

    @property
    def _groups(self) -> int:
        if self.name == "all_to_all":
            return self.world_size**2
        return self.world_size if self.name in _OWNED else 1

    @property
    def pieces(self) -> int:
        """Chunks per owner (per pair of ranks for all_to_all, all chunks where no rank owns one)."""
        return self.num_chunks // self._groups

    def owner(self, chunk: int) -> int | None:
        """The rank a chunk belongs to (for all_to_all: goes to), or None if the collective has no owners."""
        if self.name in _OWNED:
            return chunk // self.pieces
        return chunk // self.pieces % self.world_size if self.name == "all_to_all" else None

    def source(self, chunk: int) -> int | None:
        """The one rank that holds a chunk before, or None if every rank contributes to it."""
        if self.name in ("broadcast", "scatter"):
            return self.root
        if self.name == "all_to_all":
            return chunk // self.pieces // self.world_size
        return self.owner(chunk) if not self.reduces else None

    def held_before(self) -> NDArray[np.bool_]:
        """The contributors of each chunk: bool, shape (world_size, num_chunks)."""
        if self.name in _ALL_CONTRIBUTE:
            return np.ones((self.world_size, self.num_chunks), dtype=np.bool_)
        return self._held_by([self.source(c) for c in range(self.num_chunks)])

    def held_after(self) -> NDArray[np.bool_]:
        """The ranks that must hold the sum of each chunk: bool, shape (world_size, num_chunks)."""
        if self.name in _ALL_RECEIVE:
            return np.ones((self.world_size, self.num_chunks), dtype=np.bool_)
        if self.name in ("reduce", "gather"):
            return self._held_by([self.root] * self.num_chunks)
        return self._held_by([self.owner(c) for c in range(self.num_chunks)])

    def _held_by(self, ranks: list[int | None]) -> NDArray[np.bool_]:
        held = np.zeros((self.world_size, self.num_chunks), dtype=np.bool_)
        held[np.array(ranks, dtype=np.int64), np.arange(self.num_chunks)] = True
        return held

    @property
    def own_nbytes(self) -> int | None:
        """Bytes of all chunks together, where the collective says so; None: any number."""
        return None

    def nbytes_of(self, chunk: NDArray[np.integer], count: NDArray[np.integer], nbytes: float) -> NDArray[np.float64]:
        """Bytes of chunks chunk .. chunk+count-1, elementwise; nbytes counts as in chunk_nbytes."""
        return np.asarray(count * self.chunk_nbytes(nbytes), dtype=np.float64)

    def chunk_nbytes(self, nbytes: float) -> float:
        """Bytes of one chunk.

        nbytes counts as in nccl-tests: the vector for all_reduce, broadcast and reduce; the whole n-rank vector for
        reduce_scatter, all_gather, gather and scatter; n times the per-rank block for all_to_all; nothing for barrier.
        """
        if self.name == "barrier":
            return 0.0
        return nbytes * (self.world_size if self.name == "all_to_all" else 1) / self.num_chunks


@dataclass(frozen=True, init=False)
class Redistribution(Collective):
    """Nothing is reduced: a tensor that lies on some ranks in one layout moves to others in another.

    sources: a rank per chunk; targets: the ranks that must hold it; nbytes: its bytes. Raises UsageError if the tables
    differ in length, name ranks that do not exist or list a source as its own target.
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
        if self.world_size < 1:
            raise UsageError(f"redistribution needs at least 1 rank, got world_size={self.world_size}")
        if not len(self.sources) == len(self.targets) == len(self.nbytes):
            raise UsageError(
                f"redistribution needs tables of one length, got {len(self.sources)} sources, {len(self.targets)} "
                f"targets, {len(self.nbytes)} nbytes"
            )
        for chunk, (source, ranks, size) in enumerate(zip(self.sources, self.targets, self.nbytes, strict=True)):
            unknown = [rank for rank in (source, *ranks) if not 0 <= rank < self.world_size]
            if unknown or source in ranks or len(set(ranks)) < len(ranks) or not ranks or size < 0:
                raise UsageError(
                    f"chunk {chunk} of a redistribution over {self.world_size} ranks: from {source} to {list(ranks)}, "
                    f"{size} bytes; expected other ranks as targets, each once"
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

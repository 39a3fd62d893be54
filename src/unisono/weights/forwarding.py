"""The steps that move chunks: from the source to every target, down a chain of them, or down a binomial tree.

In a step a rank sends one chunk at most (directly to several targets at once) and receives one at most, so a rank needs
memory for one chunk on each side.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from unisono.algorithms import chain, tree
from unisono.algorithms.formula import ceil_log2
from unisono.schedule import Step, Transfer
from unisono.weights.chunks import Chunk

__all__ = ["FORWARDS", "sends", "steps_of"]

FORWARDS = ("direct", "chain", "tree")


@lru_cache(maxsize=256)
def _hops(forward: str, targets: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The hops of one chunk, those of one level together: (src, dst), 0 is the source, 1 .. targets its targets."""
    if forward == "direct":
        return (tuple((0, i + 1) for i in range(targets)),)
    build = chain.broadcast if forward == "chain" else tree.broadcast
    return tuple(((transfer.src, transfer.dst),) for step in build(targets + 1).steps for transfer in step)


def sends(forward: str, targets: int) -> int:
    """How often a chunk for so many targets leaves its source."""
    return {"direct": targets, "chain": 1, "tree": ceil_log2(targets + 1)}[forward]


@dataclass(eq=False)
class _Hop:
    """One hop of all chunks with one source and one set of targets; `before` is the hop that brings them to `src`."""

    src: int
    dst: tuple[int, ...]
    chunks: Sequence[int]
    before: "_Hop | None"
    done: int = 0

    @property
    def ready(self) -> bool:
        """True if `src` has the next chunk."""
        return self.done < (len(self.chunks) if self.before is None else self.before.done)


def steps_of(chunks: Sequence[Chunk], forward: str) -> tuple[Step, ...]:
    """Steps that bring every chunk to all of its targets; ranks with most bytes left to send or receive go first."""
    hops = _hops_of(chunks, forward)
    sending, receiving = Counter[int](), Counter[int]()
    for hop in hops:
        total = sum(chunks[number].nbytes for number in hop.chunks)
        sending[hop.src] += total * len(hop.dst)
        receiving.update(dict.fromkeys(hop.dst, total))

    def left(hop: _Hop) -> int:
        return -max(sending[hop.src], *(receiving[rank] for rank in hop.dst))

    steps = []
    while hops:
        busy: tuple[set[int], set[int]] = (set(), set())
        going = []
        for hop in sorted((hop for hop in hops if hop.ready), key=left):
            if hop.src not in busy[0] and busy[1].isdisjoint(hop.dst):
                busy[0].add(hop.src)
                busy[1].update(hop.dst)
                going.append(hop)
        moved = []
        for hop in going:
            number = hop.chunks[hop.done]
            hop.done += 1
            moved += [Transfer(hop.src, rank, number) for rank in hop.dst]
            sending[hop.src] -= chunks[number].nbytes * len(hop.dst)
            receiving.subtract(dict.fromkeys(hop.dst, chunks[number].nbytes))
        steps.append(Step.of(*moved))
        hops = [hop for hop in hops if hop.done < len(hop.chunks)]
    return tuple(steps)


def _hops_of(chunks: Sequence[Chunk], forward: str) -> list[_Hop]:
    streams: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for number, chunk in enumerate(chunks):
        streams.setdefault((chunk.source, chunk.targets), []).append(number)
    found = []
    for (source, targets), numbers in streams.items():
        ranks, bringing = (source, *targets), dict[int, _Hop]()
        for pairs in _hops(forward, len(targets)):
            src, dst = pairs[0][0], [b for _, b in pairs]
            hop = _Hop(ranks[src], tuple(ranks[b] for b in dst), numbers, bringing.get(src))
            bringing |= dict.fromkeys(dst, hop)
            found.append(hop)
    return found

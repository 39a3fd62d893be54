"""The steps that move chunks: from the source to every target, down a chain of them, or down a binomial tree.

In a step a rank sends one chunk at most (directly to several targets at once) and receives one at most, so a rank needs
memory for one chunk on each side. Chunks that can move, move: the first that finds its ranks free goes.
"""

from collections.abc import Sequence
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


def steps_of(chunks: Sequence[Chunk], forward: str) -> tuple[Step, ...]:
    """Steps that bring every chunk to all of its targets."""
    waiting = [
        [(number, tuple((ranks[a], ranks[b]) for a, b in hops)) for hops in _hops(forward, len(chunk.targets))]
        for number, chunk in enumerate(chunks)
        for ranks in [(chunk.source, *chunk.targets)]
    ]
    steps, arrived = list[Step](), {(chunk.source, number): 0 for number, chunk in enumerate(chunks)}
    left = [hop for hops in waiting for hop in hops]
    while left:
        sending: set[int] = set()
        receiving: set[int] = set()
        moved, later = [], []
        for number, hops in left:
            src, targets = hops[0][0], [dst for _, dst in hops]
            there = arrived.get((src, number), len(steps) + 1) <= len(steps)
            if not there or src in sending or not receiving.isdisjoint(targets):
                later.append((number, hops))
                continue
            sending.add(src)
            receiving.update(targets)
            moved += [Transfer(src, dst, number) for dst in targets]
        for transfer in moved:
            arrived[transfer.dst, transfer.chunk] = len(steps) + 1
        steps.append(Step.of(*moved))
        left = later
    return tuple(steps)

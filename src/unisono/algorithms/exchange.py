"""All-to-all in rounds: each rank sends one block and receives one block per step.

shift: in round i rank r sends to r+i and receives from r-i; n-1 rounds for any n.
pairwise: in each round the ranks pair up and swap, as in a tournament in which every rank meets every rank (n-1 rounds
for even n; n for odd n, where one rank rests). A rank never receives into a block that it has yet to send, so the swap
works in place.
"""

import numpy as np

from unisono.algorithms.registry import register_algorithm
from unisono.schedule import Collective, Schedule, Step

__all__ = ["pairwise", "shift"]


@register_algorithm("shift", "all_to_all", steps="n-1", nbytes_per_rank="(n-1)/n")
def shift(world_size: int, chunks: int = 1) -> Schedule:
    """Round i: send to the i-th rank after, receive from the i-th before."""
    src = np.arange(world_size)
    peers = [(src + i) % world_size for i in range(1, world_size)]
    steps = tuple(Step.make(src, dst, (src * world_size + dst) * chunks, chunks) for dst in peers)
    return Schedule("shift", Collective.of("all_to_all", world_size, chunks), steps)


@register_algorithm("pairwise", "all_to_all", steps="n - 1 + n % 2", nbytes_per_rank="(n-1)/n")
def pairwise(world_size: int, chunks: int = 1) -> Schedule:
    """Tournament: ranks swap in pairs; serves in place."""
    circle = world_size - 1 + world_size % 2
    steps = []
    for i in range(circle if world_size > 1 else 0):
        peer = np.arange(world_size)
        peer[:circle] = (i - peer[:circle]) % circle
        if circle < world_size:
            alone = int(np.flatnonzero(peer[:circle] == np.arange(circle))[0])
            peer[alone], peer[circle] = circle, alone
        src = np.flatnonzero(peer != np.arange(world_size))
        steps.append(Step.make(src, peer[src], (src * world_size + peer[src]) * chunks, chunks))
    return Schedule("pairwise", Collective.of("all_to_all", world_size, chunks), tuple(steps))

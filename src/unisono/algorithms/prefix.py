"""Prefix: sums go from host to host, each adding its ranks' contributions to what the hosts before it have summed.

all_reduce: every host sums in columns, as `columns` does, but behind the partial sum of the ranks before it; the last
host has the totals and gives them to all ranks. For hosts of ranks 0-1 and 2-3:

    step 0: 1>0 c0 +, 0>1 c1 +
    step 1: 0>2 c0 +, 3>2 c0 +, 1>3 c1 +, 2>3 c1 +
    step 2: 2>0 c0 =, 2>1 c0 =, 2>3 c0 =, 3>0 c1 =, 3>1 c1 =, 3>2 c1 =

So every element is summed as on one host, `0+1+2+3`, bit for bit. What crosses to a host does so once for all its ranks
where they share memory, so that a link carries the tensor once each way. `chunks` pieces run one step apart: partial
sums go up while totals come down. Options: hosts (schedule/hosts.py; any cut, by runs of ranks, by default the most
nearly square grid).
"""

from collections.abc import Sequence

import numpy as np

from unisono.algorithms.cut import Cut, HostsOption, Ints, cut_of
from unisono.algorithms.registry import register_algorithm
from unisono.schedule import Collective, Schedule, Step
from unisono.schedule.transform import overlap

__all__ = ["all_reduce", "reduce"]


@register_algorithm("prefix", "all_reduce", steps="(n>1)*(b-1 + (a>1) + k)", nbytes_per_rank="(a-1 + n-1)/a")
def all_reduce(world_size: int, chunks: int = 1, hosts: HostsOption = None) -> Schedule:
    """Sums from host to host, then the totals to all."""
    return _schedule("all_reduce", cut_of(world_size, hosts, True), 0, chunks, np.arange(world_size))


@register_algorithm("prefix", "reduce", steps="(n>1)*(b-1 + (a>1) + k)", nbytes_per_rank="(n>1)")
def reduce(world_size: int, root: int = 0, chunks: int = 1, hosts: HostsOption = None) -> Schedule:
    """Sums from host to host, then the totals to the root."""
    return _schedule("reduce", cut_of(world_size, hosts, True), root, chunks, np.array([root]))


def _schedule(collective: str, cut: Cut, root: int, chunks: int, to: Ints) -> Schedule:
    columns, last = cut.owner.shape[1], cut.owner[-1]
    steps = [step for group in range(len(cut.groups)) if len(step := _adding(cut, group))]
    src, dst = (ends.ravel() for ends in np.meshgrid(np.arange(columns), to, indexing="ij"))
    others = last[src] != dst
    if others.any():
        steps.append(Step.make(last[src[others]], dst[others], src[others]))
    made: Sequence[Step] = steps
    if chunks > 1:
        made = overlap(steps, cut.world_size, np.arange(chunks * columns).reshape(chunks, columns))
    return Schedule("prefix", Collective.of(collective, cut.world_size, chunks * columns, root), made)


def _adding(cut: Cut, group: int) -> Step:
    """The partial sums of the groups before one, and the contributions of its ranks, to the owners of its columns."""
    columns = np.arange(cut.owner.shape[1])
    owner = cut.owner[group]
    src, column = (ends.ravel() for ends in np.meshgrid(np.array(cut.groups[group]), columns, indexing="ij"))
    inside = src != owner[column]
    src, column = src[inside], column[inside]
    if group:
        src, column = np.concatenate([cut.owner[group - 1], src]), np.concatenate([columns, column])
    return Step.make(src, owner[column], column, 1, True)

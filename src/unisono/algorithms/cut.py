"""The cut of ranks over hosts, as leaders and columns see it.

Sums go by runs (schedule/hosts.py) in place of hosts: a run's partial sum is taken in rank order, and the partial sums
of runs are combined from the first to the last wherever they meet in one step. So the ranks' order is kept, whatever
the cut, and every element's sum is associated alike: by runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from unisono.algorithms.formula import squarish
from unisono.schedule import Hosts, Step, as_hosts, runs_of

__all__ = ["Cut", "HostsOption", "Ints", "cut_of", "once"]

Ints = NDArray[np.int64]
HostsOption = int | str | Sequence[Sequence[int]] | None


@dataclass(frozen=True)
class Cut:
    """Groups of ranks: hosts, or runs of ranks on hosts.

    Rank r is number ``number[r]`` of group ``group[r]``. There are as many columns as the largest group has ranks; a
    smaller group's ranks own several each, ``owner[g, c]`` owns column c in group g.
    """

    groups: Hosts

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.group)

    @cached_property
    def sizes(self) -> Ints:
        """Ranks of each group, int64, shape (groups,)."""
        return np.array([len(ranks) for ranks in self.groups])

    @cached_property
    def group(self) -> Ints:
        """The group of each rank, int64, shape (ranks,)."""
        return self._by_rank(np.repeat(np.arange(len(self.groups)), self.sizes))

    @cached_property
    def number(self) -> Ints:
        """The number of each rank within its group, int64, shape (ranks,)."""
        return self._by_rank(np.concatenate([np.arange(size) for size in self.sizes]))

    def _by_rank(self, values: Ints) -> Ints:
        made = np.empty_like(values)
        made[np.concatenate(self.groups)] = values
        return made

    @cached_property
    def owner(self) -> Ints:
        """The rank that owns each column in each group, int64, shape (groups, columns)."""
        columns = int(self.sizes.max())
        return np.array([np.array(ranks)[np.arange(columns) * len(ranks) // columns] for ranks in self.groups])

    def columns(self, rank: Ints) -> tuple[Ints, Ints]:
        """The first of the columns that each rank owns, and their number."""
        columns, size, number = self.owner.shape[1], self.sizes[self.group[rank]], self.number[rank]
        first, end = (-(-k * columns // size) for k in (number, number + 1))
        return first, end - first

    def counterpart(self, group: Ints, rank: Ints) -> Ints:
        """The rank of a group that stands for a rank: of the same number, where groups have as many ranks."""
        flat, first = np.concatenate(self.groups), np.cumsum(self.sizes) - self.sizes
        return flat[first[group] + self.number[rank] * self.sizes[group] // self.sizes[self.group[rank]]]

    def leaders(self, root: int | None = None) -> Ints:
        """The first rank of each group, or the root, int64, shape (groups,)."""
        first = np.array([ranks[0] for ranks in self.groups])
        if root is not None:
            first[self.group[root]] = root
        return first

    @cached_property
    def inside(self) -> tuple[Ints, Ints]:
        """All ordered pairs (src, dst) of different ranks of one group, by group, dst and src."""
        made = []
        for ranks in map(np.array, self.groups):
            dst, src = np.divmod(np.arange(len(ranks) ** 2), len(ranks))
            made.append(np.stack([ranks[src], ranks[dst]])[:, src != dst])
        src, dst = np.concatenate(made, axis=1)
        return src, dst

    def followers(self, leaders: Ints) -> Ints:
        """All ranks that lead no group, int64."""
        return np.setdiff1d(np.arange(self.world_size), leaders)

    @cached_property
    def spans(self) -> Ints:
        """The runs of all groups as rows (group, first rank, count), int64, shape (runs, 3)."""
        return np.array([(self.group[run[0]], run[0], len(run)) for run in runs_of(self.groups)], dtype=np.int64)


def cut_of(world_size: int, hosts: HostsOption, sums: bool) -> Cut:
    """The hosts as groups, for what ``sums`` their runs; by default the most nearly square grid.

    Raises UsageError if the hosts do not hold every rank once.
    """
    found = as_hosts(squarish(world_size)[0] if hosts is None else hosts, world_size)
    return Cut(runs_of(found) if sums else found)


def once(*steps: Step) -> tuple[Step, ...]:
    """Those steps in which something moves."""
    return tuple(step for step in steps if len(step))

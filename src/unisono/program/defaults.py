"""The defaults of `dist.all_reduce(x)`: registered schedules and placements, by collective, size and load.

Every rank asks with the same arguments, so ranks agree without a word. `unisono plan --default` prints the table,
`unisono draw default all_reduce -n 4 --bytes 1MiB` what it chooses.

Sizes were measured (benchmarks/speed_against_gloo, benchmarks/many_ranks). A group is *oversubscribed* if its host has
more of its ranks than cores: there a meeting costs a slice of the scheduler, so that few meetings of much data win.
"""

from dataclasses import dataclass, replace

from unisono.algorithms import build
from unisono.errors import UsageError
from unisono.schedule import Schedule
from unisono.units import show_nbytes

__all__ = ["DIRECT_MOVED", "TABLE", "Default", "default"]

KIB, MIB = 1 << 10, 1 << 20
DIRECT_MOVED = 8 * MIB
"""Bytes that a rank moves between two meetings of a direct call: no rank gets far ahead, and a lost one is noticed."""
_ANY = 1 << 62


@dataclass(frozen=True)
class Default:
    """A row of the table: what a collective uses up to a size.

    ``upto``: bytes of the tensor, or of one rank's piece where each has one, times the ranks if ``times_ranks``.
    ``oversubscribed``: whether the row is for oversubscribed groups, None: for both. ``chunks``: pieces per block, 0
    for as many as there are ranks. ``cap``: bytes of a chunk, at most, that go between two meetings. ``directly``: the
    placement between shared tensors, of more than ``directly_above`` bytes.
    """

    collective: str
    upto: int
    schedule: str
    placement: str = "staged"
    oversubscribed: bool | None = None
    times_ranks: bool = False
    chunks: int = 1
    cap: int = _ANY
    directly: str = ""
    directly_above: int = 0

    def build(self, world_size: int, root: int = 0) -> Schedule:
        """The schedule."""
        return build(self.schedule, self.collective, world_size, root, self.chunks or world_size)

    def describe(self) -> str:
        """The row in words."""
        if self.upto == _ANY:
            limit = "any size"
        else:
            limit = f"up to {show_nbytes(self.upto)}" + (" / ranks" if self.times_ranks else "")
        where = {None: "", True: ", more ranks than cores", False: ", a core per rank"}[self.oversubscribed]
        return f"{limit}{where}: {self.schedule}, {self.placement}"


TABLE = (
    Default("barrier", _ANY, "one_shot"),
    Default("all_reduce", 8 * KIB, "one_shot", oversubscribed=False, times_ranks=True),
    Default("all_reduce", 128 * KIB, "one_shot", oversubscribed=True, times_ranks=True),
    Default("all_reduce", _ANY, "two_phase", "mailbox", directly="direct"),
    Default("reduce", 128 * KIB, "star", times_ranks=True),
    Default("reduce", _ANY, "two_phase", "mailbox"),
    Default("reduce_scatter", _ANY, "direct", directly="direct", directly_above=MIB),
    Default("all_gather", _ANY, "direct", directly="direct", directly_above=MIB),
    Default("all_to_all", _ANY, "direct", directly="direct", directly_above=MIB),
    Default("broadcast", _ANY, "star", chunks=0, directly="pushed", directly_above=MIB),
    Default("gather", _ANY, "star"),
    Default("scatter", _ANY, "star"),
)
"""The first row that fits counts."""


def default(collective: str, nbytes: int, world_size: int, oversubscribed: bool = False) -> Default:
    """The row for a call.

    ``nbytes``: of the tensor for all_reduce, reduce and broadcast, else of one rank's piece, the longest of all.
    Raises UsageError for a collective that does not exist.
    """
    for row in TABLE:
        fits = row.collective == collective and row.oversubscribed in (None, oversubscribed)
        if fits and nbytes * (world_size if row.times_ranks else 1) <= row.upto:
            return row if world_size > 1 else replace(row, placement="staged", directly="")
    raise UsageError(f"unknown collective {collective!r}")

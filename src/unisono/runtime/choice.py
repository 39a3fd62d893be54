"""The schedule of a call and its placement: by the table of defaults, or an algorithm by name."""

import hashlib
from dataclasses import dataclass
from functools import cache
from math import sqrt

from unisono.algorithms import build
from unisono.program import best_staged, default, lower
from unisono.program.bind import LINE
from unisono.program.lower import Unfit
from unisono.program.slots import ROOM
from unisono.schedule import Schedule, preset
from unisono.selection import BY_DEFAULT, Measured, Selector

__all__ = ["MEASURED", "Choice", "by_default", "by_hosts", "by_measurement", "by_name", "table_mark"]

MEASURED = "measured"
"""Compared by the guard before all else if measurements choose."""
_MEETING, _STAGED = 128 << 10, 1 << 20
"""Over hosts: bytes that a link carries in the time that a meeting takes beside its data, about alike for 1 Gbit/s and
0.1 ms as for 100 Mbit/s and 10 ms; what a rank stages at once."""
_PIECE, _BURST = _MEETING // 12, 1.5
"""Measured over both links (benchmarks/over_hosts): what a meeting costs among pieces that overlap; how much longer
bytes take that all cross before any is summed."""
_OWNED = ("reduce_scatter", "all_gather", "all_to_all")


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule and its placements, see program/defaults.py; ``directly`` is empty if the call is always staged."""

    schedule: Schedule
    placement: str
    deterministic: bool = False
    cap: int = 1 << 62
    directly: str = ""
    directly_above: int = 0

    @property
    def root(self) -> int:
        """The root; 0 where there is none."""
        return self.schedule.collective.root

    @property
    def direct_root(self) -> int:
        """The only rank whose tensor is read directly; -1 where all are."""
        return self.root if self.schedule.collective.name == "broadcast" else -1


def by_default(collective: str, nbytes: int, world_size: int, root: int, oversubscribed: bool) -> Choice:
    """The choice of the table of defaults; see `default`."""
    row = default(collective, nbytes, world_size, oversubscribed)
    schedule = row.build(world_size, root)
    return Choice(schedule, row.placement, False, row.cap, row.directly, row.directly_above)


def by_hosts(
    collective: str, nbytes: int, world_size: int, root: int, oversubscribed: bool, hosts: tuple[tuple[int, ...], ...]
) -> Choice:
    """The choice in a group over several hosts, the ranks of each given: every sum is as on one host.

    What little is summed is sent to all hosts as it is; of more, every rank sums a part and sends the total to all; of
    large tensors partial sums go from host to host. The least by what crosses and the meetings that it takes counts.
    """
    if collective not in ("all_reduce", "reduce"):
        return by_default(collective, nbytes, world_size, root, oversubscribed)
    local, count, pieces = max(map(len, hosts)), len(hosts), -(-nbytes // _STAGED) or 1
    raw = nbytes * local * (world_size - local) / world_size  # from a host, of the parts that others sum
    totals = count - 1 if collective == "all_reduce" else 1  # times that the last host sends them
    parts = max(1, round(sqrt((count - 1) * nbytes / _PIECE)))  # of the partial sums that go from host to host
    costs = {
        "one_shot": _cost(pieces, local, (world_size - min(map(len, hosts))) * nbytes),
        "two_phase": _cost(pieces, local, _BURST * raw) + _MEETING + _BURST * nbytes * local * (count - 1) / world_size,
        "prefix": (count + 1) * _MEETING + parts * _PIECE + nbytes * (totals + (count - 1) / parts),
    }
    name = min(costs, key=lambda each: costs[each])
    if name == "two_phase":
        return Choice(build(name, collective, world_size, root), "mailbox")
    if name == "prefix":
        made = build(name, collective, world_size, root, hosts=hosts)
        return Choice(made, "staged", cap=-(-nbytes // (parts * made.collective.num_chunks * LINE)) * LINE)
    return Choice(build(name if collective == "all_reduce" else "star", collective, world_size, root), "staged")


def _cost(meetings: int, local: int, nbytes: float) -> float:
    """Of so many meetings that share bytes which cross from so many ranks, the first one's before ranks agree."""
    return (meetings + (nbytes > meetings * local * ROOM)) * _MEETING + nbytes


def by_name(
    algorithm: str, collective: str, world_size: int, root: int, chunks: int, deterministic: bool, **options: object
) -> Choice:
    """An algorithm, placed as well as it can be: with mailboxes, and directly where that takes two meetings.

    Raises UsageError if there is no such algorithm for the collective, or it does not fit the number of ranks.
    """
    schedule = build(algorithm, collective, world_size, root, chunks, **options)
    placement = best_staged(schedule, deterministic)
    directly = ""
    if not deterministic and collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        try:
            directly = "direct" if lower(schedule, 0, "direct").meetings == 2 else ""
        except Unfit:
            directly = ""
    above = 0 if placement == "mailbox" else 1 << 20
    return Choice(schedule, placement, deterministic, 1 << 62, directly, above)


@cache
def _table() -> Measured:
    """The table of `unisono tune` for this machine; read once, so that a new table changes no running program."""
    return Measured.load()


@cache
def table_mark() -> str:
    """The mark of what was measured on this machine's CPUs, which ranks compare at the first call."""
    return hashlib.blake2b(repr(_table().of_cpus).encode(), digest_size=4).hexdigest()


@cache
def _selector(collective: str, world_size: int) -> Selector:
    """By what was measured, or, if no schedule was, by the model."""
    table = _table()
    named = set(table.algorithms(collective, world_size)) - {BY_DEFAULT}
    return Selector(collective, preset("shared_memory", world_size), table if named else None)


def by_measurement(
    collective: str, nbytes: int, world_size: int, root: int, deterministic: bool, oversubscribed: bool
) -> Choice:
    """The fastest schedule for a size, as measured, or else as simulated; ``nbytes`` as in `by_default`."""
    if world_size == 1:
        return by_default(collective, nbytes, world_size, root, oversubscribed)
    whole = nbytes * world_size if collective in _OWNED else nbytes
    best, table = _selector(collective, world_size).choose(whole).best, _table()
    if BY_DEFAULT in table.algorithms(collective, world_size):
        usual = table.seconds(collective, world_size, BY_DEFAULT, whole)
        if not best.measured or usual <= best.seconds:
            return by_default(collective, nbytes, world_size, root, oversubscribed)
    made = best.candidate
    return by_name(made.algorithm.name, collective, world_size, root, best.chunks, deterministic, **dict(made.options))

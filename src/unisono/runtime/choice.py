"""The schedule of a call and its placement: by the table of defaults, or an algorithm by name."""

import hashlib
from dataclasses import dataclass
from functools import cache
from math import sqrt

from unisono.algorithms import build
from unisono.program import best_staged, default, lower
from unisono.program.lower import Unfit
from unisono.schedule import Schedule, preset
from unisono.selection import Measured, Selector

__all__ = ["MEASURED", "Choice", "by_default", "by_hosts", "by_measurement", "by_name", "table_mark"]

MEASURED = "measured"
"""Compared by the guard before all else if measurements choose."""
DEFAULT = "default"
"""The name of the table's choice among the algorithms that `unisono tune` measures."""
_SENT_TO_ALL = 1 << 20
"""Bytes that may cross to a host so that all ranks there sum by themselves: what one message carries (crossing.py)."""
_MEETING, _STAGED, _MOST_PIECES = 64 << 10, 1 << 20, 32
"""Of larger sums: bytes that a link carries in the time that a meeting takes beside its data; of a rank's piece, at
most, since no more is staged at once; pieces."""
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

    What little is summed is sent to all hosts as it is; of larger tensors partial sums go from host to host.
    """
    crossing = (world_size - min(map(len, hosts))) * nbytes  # to a host, if all is sent there
    if collective not in ("all_reduce", "reduce"):
        return by_default(collective, nbytes, world_size, root, oversubscribed)
    if crossing <= _SENT_TO_ALL:
        return Choice(
            build("one_shot" if collective == "all_reduce" else "star", collective, world_size, root), "staged"
        )
    return Choice(build("prefix", collective, world_size, root, _pieces(nbytes, hosts), hosts=hosts), "staged")


def _pieces(nbytes: int, hosts: tuple[tuple[int, ...], ...]) -> int:
    """The pieces of a sum that goes from host to host: k of them take (k + 1) meetings and as much of the link's time.

    That is least for the square root of the bytes by those that a meeting costs.
    """
    staged = _STAGED * min(map(len, hosts))
    return max(1, min(_MOST_PIECES, max(round(sqrt(nbytes / _MEETING)), nbytes // staged)))


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
    """The mark of this machine's table, which ranks compare at the first call."""
    return hashlib.blake2b(repr(_table().rows).encode(), digest_size=4).hexdigest()


@cache
def _selector(collective: str, world_size: int) -> Selector:
    """By what was measured, or, if no schedule was, by the model."""
    table = _table()
    named = set(table.algorithms(collective, world_size)) - {DEFAULT}
    return Selector(collective, preset("shared_memory", world_size), table if named else None)


def by_measurement(
    collective: str, nbytes: int, world_size: int, root: int, deterministic: bool, oversubscribed: bool
) -> Choice:
    """The fastest schedule for a size, as measured, or else as simulated; ``nbytes`` as in `by_default`."""
    if world_size == 1:
        return by_default(collective, nbytes, world_size, root, oversubscribed)
    whole = nbytes * world_size if collective in _OWNED else nbytes
    best, table = _selector(collective, world_size).choose(whole).best, _table()
    if DEFAULT in table.algorithms(collective, world_size):
        usual = table.seconds(collective, world_size, DEFAULT, whole)
        if not best.measured or usual <= best.seconds:
            return by_default(collective, nbytes, world_size, root, oversubscribed)
    made = best.candidate
    return by_name(made.algorithm.name, collective, world_size, root, best.chunks, deterministic, **dict(made.options))

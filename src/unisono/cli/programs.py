"""Helpers of commands about programs: the defaults, the programs of its ranks, their tables and proofs.

Sizes count as in `Collective.chunk_nbytes`: the tensor of an all_reduce, the whole of what n ranks gather.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as RichTable

from unisono.algorithms import build
from unisono.cli.common import echo, show
from unisono.errors import UsageError
from unisono.gpu.defaults import tuned_table
from unisono.program import Default, Program, Table, best_staged, bind, default, lower
from unisono.program.defaults import DIRECT_MOVED, TABLE
from unisono.program.over_hosts import bind_over_hosts
from unisono.program.proof import Proof
from unisono.runtime.choice import by_hosts
from unisono.schedule import Collective, Hosts, Schedule
from unisono.selection import BY_DEFAULT, Measured
from unisono.transport.layout import Layout
from unisono.transport.process import cores
from unisono.units import parse_nbytes, show_count, show_nbytes, show_ranks
from unisono.verification import verify

__all__ = [
    "DEFAULT_NOTES",
    "MOST_RANKS",
    "Placed",
    "default_table",
    "describe_default",
    "find_default",
    "is_oversubscribed",
    "place_default",
    "place_over_hosts",
    "programs",
    "prove_placed",
    "show_gpu_table",
    "tables_of",
]

_DIRECT = ("direct", "pushed")  # placements between shared tensors
MOST_RANKS = 64
_MOST_ROWS = 500_000
_LARGEST = 1 << 60
"""Bytes from which on a limit is none."""
_CORES = {None: "", True: "shared", False: "own"}
DEFAULT_NOTES = """\
The first row that fits counts. Up to: bytes of the tensor, or of a rank's piece
where each has its own; n ranks. Shared: if all tensors are of unisono.empty.
Cores: each rank has its own, or there are more ranks than cores."""
"""The meaning of the columns of `default_table`."""


@dataclass(frozen=True)
class Placed:
    """A schedule, how its programs move data, and the bytes of a chunk, at most, that go between two meetings.

    Without a placement it is the one that the backend uses. ``hosts``: the ranks of each, where there are several.
    """

    schedule: Schedule
    placement: str = ""
    cap: int = 1 << 40
    hosts: Hosts = ()

    def tables(self, nbytes: int, rank: int | None = None) -> list[Table]:
        """The tables of all ranks, or of one, for a call of so many bytes.

        Raises UsageError as `programs` does, and for messages, which have none.
        """
        made = programs(self.schedule, self.placement, rank)
        if made[0].placement == "messages":
            raise UsageError(
                f"{made[0].name} by messages has no table: only programs over shared memory are bound to sizes"
            )
        sizes, stage = _sizes(self.schedule.collective, nbytes), Layout(self.schedule.world_size).stage
        if len(self.hosts) > 1 and made[0].placement not in _DIRECT:
            return [
                bind_over_hosts(self.schedule, p.rank, p.placement, sizes, self.hosts, stage=stage, cap=self.cap)
                for p in made
            ]
        area = DIRECT_MOVED if made[0].placement in _DIRECT else stage
        return [bind(program, sizes, area=area, cap=self.cap) for program in made]


def is_oversubscribed(ranks: int) -> bool:
    """True if so many ranks have to share the cores of this machine."""
    return ranks > cores()


def find_default(collective: str, nbytes: int, ranks: int, oversubscribed: bool | None = None) -> Default:
    """The row of the table for a call on this machine, or as if it was oversubscribed, or was not.

    Raises UsageError for a collective that does not exist and for less than one rank.
    """
    size = _block_nbytes(Collective.of(collective, ranks), nbytes)
    return default(collective, size, ranks, is_oversubscribed(ranks) if oversubscribed is None else oversubscribed)


def place_default(row: Default, nbytes: int, ranks: int, root: int = 0) -> list[Placed]:
    """The programs of a row for a call: over staging memory, then, if it is large enough, between shared tensors.

    Tensors of which the root of a broadcast may push a part are also read without. One rank alone pushes nothing.
    """
    schedule = row.build(ranks, root)
    found = [Placed(schedule, row.placement if ranks > 1 else "staged", min(row.cap, Placed.cap))]
    if row.directly and ranks > 1 and _block_nbytes(schedule.collective, nbytes) > row.directly_above:
        found += [Placed(schedule, placement) for placement in dict.fromkeys(["direct", row.directly])]
    return found


def place_over_hosts(collective: str, nbytes: int, hosts: Hosts, root: int = 0) -> Placed:
    """The program of a call in a group over several hosts, as the backend chooses it there."""
    ranks = sum(map(len, hosts))
    size = _block_nbytes(Collective.of(collective, ranks), nbytes)
    choice = by_hosts(collective, size, ranks, root, is_oversubscribed(max(map(len, hosts))), hosts)
    return Placed(choice.schedule, choice.placement, min(choice.cap, Placed.cap), hosts)


def programs(schedule: Schedule, placement: str = "", rank: int | None = None) -> list[Program]:
    """The programs of all ranks, or of one; without a placement, the one that the backend uses.

    Raises UsageError if the placement does not exist or does not fit, and if there is no such rank or there are many.
    """
    if rank is None and schedule.world_size > MOST_RANKS:
        raise UsageError(
            f"{schedule.name} {schedule.collective.name} has {schedule.world_size} ranks; programs of up to "
            f"{MOST_RANKS} are shown at once: name one with --rank"
        )
    placement = placement or best_staged(schedule)
    return [lower(schedule, r, placement) for r in (range(schedule.world_size) if rank is None else [rank])]


def tables_of(algorithm: str, collective: str, nbytes: int, ranks: int) -> list[Table]:
    """The tables of all ranks for an algorithm by name, or for the default, over staging memory."""
    if algorithm == BY_DEFAULT:
        placed = place_default(find_default(collective, nbytes, ranks), nbytes, ranks)[0]
    else:
        placed = Placed(build(algorithm, collective, ranks))
    return placed.tables(nbytes)


def prove_placed(found: list[Placed], nbytes: int, in_place: bool = False) -> list[Proof]:
    """Plays the tables of all ranks in a call of so many bytes. Raises UsageError if that would take minutes.

    An all_to_all in place is never direct: its tensors are not offered.
    """
    swaps = in_place and found[0].schedule.collective.name == "all_to_all"
    return [_prove(placed, nbytes, in_place) for placed in found if not (swaps and placed.placement in _DIRECT)]


def _prove(placed: Placed, nbytes: int, in_place: bool) -> Proof:
    tables = placed.tables(nbytes)
    played = sum(table.pieces * len(table.rows) for table in tables)
    if played > _MOST_ROWS:
        raise UsageError(
            f"{tables[0].program.name}, {tables[0].program.placement}, has {played:,} rows to play, expected up to "
            f"{_MOST_ROWS:,}: prove a smaller size, or fewer ranks"
        )
    c = placed.schedule.collective
    area = Layout(c.world_size).stage * (2 if len(placed.hosts) > 1 else 1)
    return verify(tables, in_place=in_place, sizes=_sizes(c, nbytes), area=area)


def _sizes(c: Collective, nbytes: int) -> list[int]:
    """Bytes of every block."""
    return [_block_nbytes(c, nbytes)] * (c.num_chunks // c.pieces)


def _block_nbytes(c: Collective, nbytes: int) -> int:
    """Of the tensor where nobody owns a chunk, else of one rank's piece."""
    return int(-(-c.chunk_nbytes(nbytes) * c.pieces // 1))


def default_table(collective: str | None = None) -> RichTable:
    """The rows of all collectives, or of one; empty columns are left out."""
    rows = [row for row in TABLE if collective in (None, row.collective)]
    cells = {
        "collective": [row.collective for row in rows],
        "up to": [_limit(row) for row in rows],
        "cores": [_CORES[row.oversubscribed] for row in rows],
        "schedule": [row.schedule for row in rows],
        "placement": [row.placement for row in rows],
        "chunks": [str(row.chunks or "n") for row in rows],
        "at most": [show_nbytes(row.cap) if row.cap < _LARGEST else "" for row in rows],
        "shared": [_shared(row) for row in rows],
    }
    table = RichTable(box=None, pad_edge=False)
    for heading, words in cells.items():
        if any(words):
            table.add_column(heading, no_wrap=True, header_style="bold")
    before = ""  # the collective of the row above, which need not be repeated
    for row in zip(*(words for words in cells.values() if any(words)), strict=True):
        table.add_row(row[0] if row[0] != before else "", *row[1:])
        before = row[0]
    return table


def show_gpu_table(measured: Measured, ranks: int, collective: str | None = None) -> None:
    """Prints which calls on GPUs go by which kernels: by what was measured, or the rows of the built-in table."""
    table = RichTable(box=None, pad_edge=False)
    for heading in ("collective", "up to", "schedule"):
        table.add_column(heading, no_wrap=True, header_style="bold")
    reached: dict[str, int] = {}  # by an earlier row, which counts
    for row in tuned_table(measured.rows, ranks):
        asked = collective in (None, row.collective) and ranks <= row.upto_ranks
        if asked and reached.get(row.collective, 0) < row.upto:
            named = "" if row.collective in reached else row.collective
            table.add_row(named, show_nbytes(row.upto), row.schedule or "NCCL")
            reached[row.collective] = row.upto
    show(Console(highlight=False), table)
    tuned = any((row.device, row.ranks) == ("cuda", ranks) for row in measured.rows)
    source = "measured on this host by `unisono tune`" if tuned else "built in"
    echo(f"For {show_ranks(ranks)} on GPUs, {source}. What is larger goes to NCCL; up to: bytes of the whole tensor.")


def _limit(row: Default) -> str:
    if row.collective == "barrier":
        return ""
    return "any" if row.upto >= _LARGEST else show_nbytes(row.upto) + ("/n" if row.times_ranks else "")


def _shared(row: Default) -> str:
    return row.directly + (f" >{show_nbytes(row.directly_above).replace(' ', '')}" if row.directly_above else "")


def describe_default(collective: str, nbytes: str | None, ranks: int, oversubscribed: bool | None = None) -> list[str]:
    """Lines: the schedule for one call, on how many cores, what it comes to, and how to see it."""
    size = parse_nbytes(nbytes or "0")
    row = find_default(collective, size, ranks, oversubscribed)
    full = is_oversubscribed(ranks) if oversubscribed is None else oversubscribed
    of, option = (f" of {show_nbytes(size)}", f" --bytes {nbytes}") if nbytes else ("", "")
    piece = _block_nbytes(Collective.of(collective, ranks), size)
    of += f", {show_nbytes(piece)} a rank," if piece < size else ""
    here = f": {show_ranks(ranks)} on {show_count(cores(), 'core')} here" if oversubscribed is None else ""
    return [
        f"{collective}{of} over {show_ranks(ranks)}: {row.schedule}",
        f"{'fewer cores than ranks' if full else 'a core for each rank'}{here}",
        *_placements(row, size, ranks),
        f"drawn by `unisono draw default {collective} -n {ranks}{option}`",
    ]


def _placements(row: Default, nbytes: int, ranks: int) -> Iterator[str]:
    first, *direct = place_default(row, nbytes, ranks)
    yield f"{first.placement}: {_describe(first, nbytes)}"
    if direct:
        names = " or ".join(placed.placement for placed in direct)
        yield f"{names} between shared tensors: {_describe(direct[-1], nbytes)}"


def _describe(placed: Placed, nbytes: int) -> str:
    """One placement: chunks, pieces, meetings."""
    table = placed.tables(nbytes, 0)[0]
    chunks = show_count(placed.schedule.collective.num_chunks, "chunk")
    part = f", {show_nbytes(table.part)} of a chunk at a time" if nbytes else ""
    return f"{chunks} in {show_count(table.pieces, 'piece')}{part}, {show_count(table.meetings, 'meeting')}"

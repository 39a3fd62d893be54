"""What commands about programs share: what runs by default, the programs of its ranks, their tables and proofs.

Sizes count as in `Collective.chunk_nbytes`: the tensor of an all_reduce, the whole of what n ranks gather.
"""

from dataclasses import dataclass

from unisono.errors import UsageError
from unisono.program import PLACEMENTS, Default, Program, Table, best_staged, bind, default, lower
from unisono.program.defaults import DIRECT_MOVED
from unisono.program.proof import Proof
from unisono.schedule import COLLECTIVES, Collective, Schedule
from unisono.transport.layout import Layout
from unisono.transport.process import cores
from unisono.verification import verify

__all__ = ["Placed", "block_nbytes", "bound", "find_default", "is_crowded", "place_default", "programs", "prove_placed"]

_DIRECT = ("direct", "pushed")  # placements between shared tensors
_MOST_RANKS = 64
_MOST_ROWS = 500_000


@dataclass(frozen=True)
class Placed:
    """A schedule, how its programs move data, and the bytes of a chunk, at most, that go between two meetings.

    Without a placement it is the one that the backend uses.
    """

    schedule: Schedule
    placement: str = ""
    cap: int = 1 << 40


def is_crowded(ranks: int) -> bool:
    """Whether so many ranks have to share the cores of this machine."""
    return ranks > cores()


def find_default(collective: str, nbytes: int, ranks: int, crowded: bool | None = None) -> Default:
    """The row of the table for a call on this machine, or as if it was crowded, or was not.

    Raises UsageError for a collective that does not exist and for less than one rank.
    """
    if collective not in COLLECTIVES:
        raise UsageError(f"unknown collective {collective!r}: expected one of {', '.join(COLLECTIVES)}")
    size = block_nbytes(Collective.of(collective, ranks), nbytes)
    return default(collective, size, ranks, is_crowded(ranks) if crowded is None else crowded)


def place_default(row: Default, nbytes: int, ranks: int, root: int = 0) -> list[Placed]:
    """What a row runs for a call: over staging memory, then, if it is large enough, between shared tensors.

    Tensors of which the root of a broadcast may push a part are also read without. One rank alone pushes nothing.
    """
    schedule = row.build(ranks, root)
    found = [Placed(schedule, row.placement if ranks > 1 else "staged", min(row.cap, Placed.cap))]
    if row.directly and ranks > 1 and block_nbytes(schedule.collective, nbytes) > row.directly_above:
        found += [Placed(schedule, placement) for placement in dict.fromkeys(["direct", row.directly])]
    return found


def programs(schedule: Schedule, placement: str = "", rank: int | None = None) -> list[Program]:
    """The programs of all ranks, or of one; without a placement, the one that the backend uses.

    Raises UsageError if the placement does not exist or does not fit, and if there is no such rank or there are many.
    """
    if placement and placement not in PLACEMENTS:
        raise UsageError(f"unknown placement {placement!r}: expected one of {', '.join(PLACEMENTS)}")
    if rank is None and schedule.world_size > _MOST_RANKS:
        raise UsageError(
            f"{schedule.name} {schedule.collective.name} has {schedule.world_size} ranks; programs of up to "
            f"{_MOST_RANKS} are shown at once: name one with --rank"
        )
    placement = placement or best_staged(schedule)
    return [lower(schedule, r, placement) for r in (range(schedule.world_size) if rank is None else [rank])]


def bound(program: Program, nbytes: int, cap: int = Placed.cap) -> Table:
    """The table of a program for a call of so many bytes. Raises UsageError for messages, which have none."""
    if program.placement == "messages":
        raise UsageError(
            f"{program.name} by messages has no table: only programs over shared memory are bound to sizes"
        )
    sizes = _sizes(program.collective, nbytes)
    area = DIRECT_MOVED if program.placement in _DIRECT else Layout(program.collective.world_size).stage
    return bind(program, sizes, area=area, cap=cap)


def prove_placed(found: list[Placed], nbytes: int, in_place: bool = False) -> list[Proof]:
    """Plays the tables of all ranks in a call of so many bytes. Raises UsageError if that would take minutes.

    An all_to_all in place is never direct: its tensors are not offered.
    """
    swaps = in_place and found[0].schedule.collective.name == "all_to_all"
    return [_prove(placed, nbytes, in_place) for placed in found if not (swaps and placed.placement in _DIRECT)]


def _prove(placed: Placed, nbytes: int, in_place: bool) -> Proof:
    tables = [bound(program, nbytes, placed.cap) for program in programs(placed.schedule, placed.placement)]
    played = sum(table.pieces * len(table.rows) for table in tables)
    if played > _MOST_ROWS:
        raise UsageError(
            f"{tables[0].program.name}, {tables[0].program.placement}, has {played:,} rows to play, expected up to "
            f"{_MOST_ROWS:,}: prove a smaller size, or fewer ranks"
        )
    c = placed.schedule.collective
    return verify(tables, in_place=in_place, sizes=_sizes(c, nbytes), area=Layout(c.world_size).stage)


def _sizes(c: Collective, nbytes: int) -> list[int]:
    """Bytes of every block."""
    return [block_nbytes(c, nbytes)] * (c.num_chunks // c.pieces)


def block_nbytes(c: Collective, nbytes: int) -> int:
    """Of the tensor where nobody owns a chunk, else of one rank's piece."""
    return int(-(-c.chunk_nbytes(nbytes) * c.pieces // 1))

"""What runs by default, in words: the table, and what its row for one call comes to."""

from collections.abc import Iterator

from rich.table import Table

from unisono.cli.programs import Placed, block_nbytes, bound, find_default, is_crowded, place_default, programs
from unisono.program import Default
from unisono.program.defaults import TABLE
from unisono.schedule import Collective
from unisono.transport.process import cores
from unisono.units import parse_nbytes, show_count, show_nbytes, show_ranks

__all__ = ["default_notes", "default_table", "describe_default"]

_LARGEST = 1 << 60
"""Bytes from which on a limit is none."""
_CORES = {None: "", True: "shared", False: "own"}


def default_table(collective: str | None = None) -> Table:
    """The rows of all collectives, or of one; columns that say nothing are left out."""
    rows = [row for row in TABLE if collective in (None, row.collective)]
    cells = {
        "collective": [row.collective for row in rows],
        "up to": [_sizes(row) for row in rows],
        "cores": [_CORES[row.crowded] for row in rows],
        "schedule": [row.schedule for row in rows],
        "placement": [row.placement for row in rows],
        "chunks": [str(row.chunks or "n") for row in rows],
        "at most": [show_nbytes(row.cap) if row.cap < _LARGEST else "" for row in rows],
        "shared": [_shared(row) for row in rows],
    }
    table = Table(box=None, pad_edge=False)
    for heading, words in cells.items():
        if any(words):
            table.add_column(heading, no_wrap=True, header_style="bold")
    before = ""  # the collective of the row above, which need not be repeated
    for row in zip(*(words for words in cells.values() if any(words)), strict=True):
        table.add_row(row[0] if row[0] != before else "", *row[1:])
        before = row[0]
    return table


def default_notes() -> list[str]:
    """What the columns mean."""
    same = all(row.crowded is None for row in TABLE)
    return [
        "The first row that fits counts. Up to: bytes of the tensor, or of a rank's piece",
        "where each has its own; n ranks. Shared: if all tensors are of unisono.empty.",
        "Whether each rank has a core of its own makes no difference."
        if same
        else "Cores: each rank has its own, or there are more ranks than cores.",
    ]


def _sizes(row: Default) -> str:
    if row.collective == "barrier":
        return ""
    return "any" if row.upto >= _LARGEST else show_nbytes(row.upto) + ("/n" if row.times_ranks else "")


def _shared(row: Default) -> str:
    return row.directly + (f" >{show_nbytes(row.directly_above).replace(' ', '')}" if row.directly_above else "")


def describe_default(collective: str, nbytes: str | None, ranks: int, crowded: bool | None = None) -> list[str]:
    """Lines: the schedule for one call, on how many cores, what it comes to, and how to see it."""
    size = parse_nbytes(nbytes or "0")
    row = find_default(collective, size, ranks, crowded)
    full = is_crowded(ranks) if crowded is None else crowded
    of, option = (f" of {show_nbytes(size)}", f" --bytes {nbytes}") if nbytes else ("", "")
    piece = block_nbytes(Collective.of(collective, ranks), size)
    of += f", {show_nbytes(piece)} a rank," if piece < size else ""
    here = f": {show_ranks(ranks)} on {show_count(cores(), 'core')} here" if crowded is None else ""
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
    table = bound(programs(placed.schedule, placed.placement, 0)[0], nbytes, placed.cap)
    chunks = show_count(placed.schedule.collective.num_chunks, "chunk")
    part = f", {show_nbytes(table.part)} of a chunk at a time" if nbytes else ""
    return f"{chunks} in {show_count(table.pieces, 'piece')}{part}, {show_count(table.meetings, 'meeting')}"

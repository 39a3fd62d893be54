"""What calls by default run, table by table, and its proofs."""

from unisono.program import Table, bind, lower
from unisono.program.defaults import DIRECT_MOVED, default
from unisono.program.proof import Proof, prove

__all__ = ["default_tables", "prove_default"]


def default_tables(
    collective: str,
    nbytes: int,
    world_size: int,
    *,
    area: int,
    root: int = 0,
    oversubscribed: bool = False,
    itemsize: int = 1,
    wide: int = 0,
    listed: tuple[bool, bool] = (False, False),
) -> dict[str, tuple[Table, ...]]:
    """The tables of all ranks for the default of a call, by placement: over staging memory, and those directly.

    ``nbytes``: of the tensor for all_reduce, reduce and broadcast, else of each rank's piece; ``area``: bytes of a
    rank's staging memory in a half; the rest as in `default` and `bind`.
    """
    row = default(collective, nbytes, world_size, oversubscribed)
    schedule = row.build(world_size, root)
    c = schedule.collective
    sizes = [nbytes] * (c.num_chunks // c.pieces)
    placed = {row.placement: area}
    if row.directly and nbytes > row.directly_above:
        placed |= dict.fromkeys(("direct",) if row.directly == "direct" else ("direct", row.directly), DIRECT_MOVED)

    def table(rank: int, placement: str) -> Table:
        cap = row.cap if placement == row.placement else 1 << 40
        return bind(
            lower(schedule, rank, placement), sizes, area=placed[placement], cap=cap, itemsize=itemsize, wide=wide,
            listed=listed if placement == row.placement else (False, False),
        )  # fmt: skip

    return {placement: tuple(table(rank, placement) for rank in range(world_size)) for placement in placed}


def prove_default(
    collective: str,
    nbytes: int,
    world_size: int,
    *,
    area: int,
    root: int = 0,
    oversubscribed: bool = False,
    in_place: bool = False,
    first_meeting: int = 0,
    itemsize: int = 1,
    wide: int = 0,
) -> dict[str, Proof]:
    """Proves what a call by default runs, by placement; ``in_place`` and ``first_meeting`` as in `prove`.

    An all_to_all in place is never direct: its tensors are not offered.
    """
    made = default_tables(
        collective, nbytes, world_size, area=area, root=root, oversubscribed=oversubscribed, itemsize=itemsize,
        wide=wide,
    )  # fmt: skip
    found = {}
    for placement, tables in made.items():
        if in_place and collective == "all_to_all" and placement == "direct":
            continue
        c = tables[0].program.collective
        sizes = [nbytes] * (c.num_chunks // c.pieces)
        found[placement] = prove(tables, sizes, area, in_place=in_place, first_meeting=first_meeting)
    return found

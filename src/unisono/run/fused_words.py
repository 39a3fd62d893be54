"""What compiled loops are told: the words of a desk (who works there, where things lie) and of an order (what to do),
and how it ends.

The loops are compiled with these inside.
"""

__all__ = [
    "ABANDONED", "ALL_GATHER", "ALL_REDUCE", "ALL_TO_ALL", "BARRIER", "BASE", "BASES", "BEGUN", "BLOCK", "BOUNDS",
    "BROADCAST", "COMPLETED", "COMPLETED_AT", "COUNTERS", "CROWDED", "DESK", "DIFFERS", "DONE", "EACH", "ENDS",
    "GATHER", "HEADER", "HEADERS", "HEADER_AT", "HOPES", "INPUTS", "ISSUED", "ISSUED_AT", "ISSUED_KEPT", "KEPT", "KIND",
    "LISTED", "MEETINGS", "MOMENTS", "NBYTES", "OFFERS", "ONE_SHOT", "OP", "ORDER", "OUTPUTS", "RANK", "RECORD",
    "REDUCE", "REDUCE_SCATTER", "ROOT", "ROUNDS", "SCATTER", "SCRATCH", "SIZE", "STAGE",
    "STAGES", "STRIDE", "UNSURE", "WAITS", "WIDTH",
]  # fmt: skip

BARRIER, BROADCAST, ALL_GATHER, ALL_TO_ALL, GATHER, SCATTER, ONE_SHOT, ALL_REDUCE, REDUCE, REDUCE_SCATTER = range(10)
"""Kinds of collectives: those that move, then those that reduce; ONE_SHOT is all_reduce and reduce where all is small.
"""
DESK = (
    "rank", "size", "counters", "headers", "header", "stages", "stage", "begun", "issued", "completed", "completed_at",
    "header_at", "issued_at", "issued_kept", "moments", "ends", "kept", "base", "scratch", "crowded",
    "offers", "bounds", "bases", "abandoned", "record",
)  # fmt: skip
"""The words of a desk (int64), in order: who works there and where things lie. Addresses, but for ``rank``, ``size``,
the bytes of a ``header``, a ``stage`` and a rank's ``record``, and how many moments that and its flight record keep."""
RANK, SIZE, COUNTERS, HEADERS, HEADER, STAGES, STAGE, BEGUN, ISSUED, COMPLETED, COMPLETED_AT = range(11)
HEADER_AT, ISSUED_AT, ISSUED_KEPT, MOMENTS, ENDS, KEPT, BASE, SCRATCH, CROWDED = range(11, 20)
OFFERS, BOUNDS, BASES, ABANDONED, RECORD = range(20, 25)
ORDER = ("kind", "meetings", "nbytes", "op", "root", "width", "listed", "stride", "each", "rounds", "hopes")
"""The words of an order (int64): a kind of call, prepared. ``nbytes``: of the tensor, or of one rank's piece where
there is a piece per rank; ``op``: see fused_sums.py; ``root``: -1 where there is none; ``width``: bytes of the tensor,
or piece, or rank's share of it, that go in one round; ``listed``: `OUTPUTS`, `INPUTS` or both, where these are not side
by side, but at the addresses in a table; ``stride``: bytes between the headers that the ranks are expected to have, 0
where all have the same; ``rounds``: of ``each`` bytes of a piece, in which the call may go directly (offers.py), 0 if
never; ``hopes``, which the loops write: whether the last one did."""
KIND, MEETINGS, NBYTES, OP, ROOT, WIDTH, LISTED, STRIDE, EACH, ROUNDS, HOPES = range(11)
OUTPUTS, INPUTS = 1, 2
BLOCK = 2048
"""Elements summed at a time, so that the partial sums stay in the first cache; the scratch has 8 bytes for each, then
8 for each rank."""
DONE, WAITS, DIFFERS, UNSURE = range(4)
"""How a collective ends: all done; at a meeting that not all have come to; headers of the ranks differ; all done, but
the lane has to map arenas or, of a direct call, to see who has given it up. Plus 4 × verdict, 16 × step."""

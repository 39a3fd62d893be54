"""What compiled loops are told: the words of a desk (who works there, where things lie) and of an order (what to do).

The loops are compiled with these inside, and cached: whoever changes something here changes them too.
"""

__all__ = [
    "ALL_GATHER", "ALL_REDUCE", "ALL_TO_ALL", "BARRIER", "BASE", "BEGUN", "BLOCK", "BROADCAST", "COMPLETED",
    "COMPLETED_AT", "COUNTERS", "CROWDED", "DESK", "ENDS", "HEADER", "HEADERS", "HEADER_AT", "ISSUED", "ISSUED_AT",
    "ISSUED_KEPT", "KEPT", "KIND", "MEETINGS", "MOMENTS", "NBYTES", "ONE_SHOT", "OP", "ORDER", "RANK",
    "REDUCE_SCATTER", "SCRATCH", "SIZE", "STAGE", "STAGES",
]  # fmt: skip

BARRIER, BROADCAST, ALL_GATHER, ALL_TO_ALL, ONE_SHOT, ALL_REDUCE, REDUCE_SCATTER = range(7)
"""Kinds of collectives: those that move, then those that reduce; ONE_SHOT and ALL_REDUCE are the two of all_reduce."""
DESK = (
    "rank", "size", "counters", "headers", "header", "stages", "stage", "begun", "issued", "completed", "completed_at",
    "header_at", "issued_at", "issued_kept", "moments", "ends", "kept", "base", "scratch", "crowded",
)  # fmt: skip
"""The words of a desk (int64), in order: who works there and where things lie. Addresses, but for ``rank``, ``size``,
the bytes of a ``header`` and a ``stage``, and how many moments the rank's record and its flight record keep."""
RANK, SIZE, COUNTERS, HEADERS, HEADER, STAGES, STAGE, BEGUN, ISSUED, COMPLETED, COMPLETED_AT = range(11)
HEADER_AT, ISSUED_AT, ISSUED_KEPT, MOMENTS, ENDS, KEPT, BASE, SCRATCH, CROWDED = range(11, 20)
ORDER = ("kind", "meetings", "nbytes", "op")
"""The words of an order (int64): a kind of call, prepared; see `step`."""
KIND, MEETINGS, NBYTES, OP = range(4)
BLOCK = 2048
"""Elements summed at a time, so that the partial sums stay in the first cache; the scratch has 8 bytes for each, then
8 for each rank."""

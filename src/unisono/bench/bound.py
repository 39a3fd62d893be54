"""Sizes and the factors of the field: what counts as size, busbw, the bytes that must be moved. Never imports torch.

Sizes count as in nccl-tests (doc/PERFORMANCE.md there): the vector for all_reduce, broadcast, reduce and send_recv, all
ranks' blocks together for the others. ``count`` is the number of elements that the call is given, so a block of those.

The bytes that any algorithm must move: each input byte is read once at least, each output byte written once. In place,
what already lies where it belongs counts for nothing.
"""

__all__ = ["VECTORS", "block_count", "bound_nbytes"]

VECTORS = frozenset({"all_reduce", "broadcast", "reduce", "send_recv"})


def block_count(collective: str, nbytes: int, itemsize: int, ranks: int) -> int:
    """Elements that a call is given for a size of about ``nbytes``: rounded down, but at least one; 0 for a barrier."""
    if collective == "barrier":
        return 0
    return max(1, nbytes // (itemsize * (1 if collective in VECTORS else ranks)))


def bound_nbytes(collective: str, nbytes: int, ranks: int, place: str) -> float:
    """Bytes read plus bytes written, of all ranks together, that no algorithm can do without."""
    if ranks == 1 and place == "in":
        return 0.0
    block, everywhere = nbytes / ranks, ranks * nbytes
    others = nbytes - block
    if collective in ("all_reduce", "all_to_all", "send_recv"):
        return 2.0 * everywhere
    if collective == "reduce":
        return everywhere + nbytes
    if collective == "broadcast":
        return float(nbytes + everywhere - (nbytes if place == "in" else 0))
    if collective == "reduce_scatter":
        return float(everywhere + nbytes)
    if collective == "all_gather":
        return nbytes + ranks * (others if place == "in" else nbytes)
    return 2.0 * nbytes if collective in ("gather", "scatter") else 0.0

"""Collectives on shared tensors: nothing is staged, every rank reads its peers' tensors where they lie (offers.py).

A direct program runs after the call's first meeting and ends with a meeting that all pass once everybody has read and
written what it shall; in a long call there are more, so that no rank gets far ahead and a lost one is noticed. What a
rank touches between two of them: its own share of all tensors (all_reduce, whose results are written into every tensor
at once), or its own output, from its peers' inputs. All is in rank order and in the dtypes of run/reduce.py: the bits
are those of the staged programs.
"""

from collections.abc import Callable, Sequence

import torch

from unisono.run.offers import LARGE, PUSHED, Direct, Extent, Offers
from unisono.run.programs import Program
from unisono.run.reduce import Reducer
from unisono.watch.call import Call

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "collect",
    "extent",
    "reduce_scatter",
    "rounds",
    "share",
    "width",
]

_MOVED, _BLOCK = 8 << 20, 256 << 10  # bytes that a rank moves between two meetings; that are combined at a time


def width(world_size: int) -> int:
    """Bytes of a rank's piece between two meetings."""
    return _MOVED // world_size // 64 * 64


def share(nbytes: int, world_size: int) -> int:
    """Bytes of one rank's share of ``nbytes``, in whole cache lines; the last ranks may get less, or nothing."""
    return -(-nbytes // (64 * world_size)) * 64


def rounds(kind: str, nbytes: int, world_size: int) -> tuple[int, int]:
    """Bytes of a piece between two meetings, and how often, for a kind of order (desk.py); never: 0.

    ``nbytes``: of the tensor, or of one rank's piece.
    """
    each, whole = width(world_size), kind in ("ALL_REDUCE", "BROADCAST")
    large = kind == "ALL_REDUCE" or (
        kind in ("BROADCAST", "ALL_GATHER", "ALL_TO_ALL", "REDUCE_SCATTER") and nbytes > LARGE
    )
    if not large or world_size == 1:
        return each, 0
    return each, -(-nbytes // (each * world_size if whole else each))


def extent(parts: Sequence[torch.Tensor]) -> Extent | None:
    """The memory that flat tensors lie in one after the other; None if they do not lie like that."""
    end = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end:
            return None
        end += part.nbytes
    return parts[0].data_ptr(), end - parts[0].data_ptr()


def all_reduce(flat: torch.Tensor, combine: Reducer) -> Direct:
    """Every rank combines its share of all tensors (``flat``: its own) and writes the result into each."""

    def program(offers: Offers, meeting: int, _: int) -> Program:
        size, rank, item = offers.size, offers.rank, flat.itemsize
        whole = [
            flat if peer == rank else offers.peer(peer, meeting, 0, flat.nbytes).view(flat.dtype)
            for peer in range(size)
        ]
        chunk = width(size) * size
        for start in range(0, flat.nbytes, chunk):
            stop = min(start + chunk, flat.nbytes)
            mine = share(stop - start, size)
            begin = start + rank * mine
            end = min(begin + mine, stop)
            for at in range(begin // item, end // item, _BLOCK // item):
                parts = [tensor[at : min(at + _BLOCK // item, end // item)] for tensor in whole]
                combine(parts, parts[rank])
                for peer in range(size):
                    if peer != rank:
                        parts[peer].copy_(parts[rank])
            yield

    return program


def reduce_scatter(inputs: Sequence[torch.Tensor], result: torch.Tensor, combine: Reducer) -> Direct:
    """Every rank combines its own piece of all inputs (``inputs``: its own, by rank; sizes may differ by rank)."""

    def program(offers: Offers, meeting: int, _: int) -> Program:
        size, rank, item = offers.size, offers.rank, result.itemsize
        first = sum(data.nbytes for data in inputs[:rank])
        pieces = [
            inputs[rank] if peer == rank else offers.peer(peer, meeting, first, result.nbytes).view(result.dtype)
            for peer in range(size)
        ]
        each = width(size) // item
        for start in range(0, max(data.numel() for data in inputs), each):
            stop = min(start + each, result.numel())
            for at in range(start, stop, _BLOCK // item):
                part = slice(at, min(at + _BLOCK // item, stop))
                combine([piece[part] for piece in pieces], result[part])
            yield

    return program


def collect(
    mine: torch.Tensor | None,
    outputs: Sequence[torch.Tensor],
    first: Callable[[Offers, int, int], int],
    longest: Callable[[], int],
) -> Direct:
    """Every rank copies ``outputs[r]`` from the tensor of rank r, all_gather and all_to_all; all are of uint8, flat.

    ``first(offers, rank, meeting)``: the byte of that tensor with which the piece for this rank begins; ``mine``: this
    rank's own piece, ``longest``: bytes of the longest of all ranks' pieces.
    """

    def program(offers: Offers, meeting: int, _: int) -> Program:
        size, rank, each = offers.size, offers.rank, width(offers.size)
        ranks = [(rank + i) % size for i in range(size)]  # not all at the same tensor at a time
        pieces = [
            mine if r == rank else offers.peer(r, meeting, first(offers, r, meeting), outputs[r].numel()) for r in ranks
        ]
        for start in range(0, longest(), each):
            for r, piece in zip(ranks, pieces, strict=True):
                target = outputs[r][start : start + each]
                if piece is not None and target.numel() and piece.data_ptr() != outputs[r].data_ptr():
                    target.copy_(piece[start : start + each])
            yield

    return program


def all_gather(call: Call, mine: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Direct:
    """`collect` of whole tensors, whose sizes may differ by rank."""
    return collect(mine, outputs, lambda offers, rank, meeting: 0, lambda: call.longest_nbytes)


def all_to_all(call: Call, mine: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Direct:
    """`collect` of the pieces that the headers tell of; each rank's lie side by side."""
    item = call.dtype.itemsize if call.dtype else 1

    def first(offers: Offers, peer: int, meeting: int) -> int:
        return sum(offers.sent(peer, meeting)[: offers.rank]) * item

    return collect(mine, outputs, first, lambda: call.longest_nbytes)


def broadcast(data: torch.Tensor, root: int) -> Direct:
    """Every rank copies the root's ``data`` (uint8, flat); the root, where it can, copies an equal share for each."""

    def program(offers: Offers, meeting: int, verdict: int) -> Program:
        size, rank, nbytes = offers.size, offers.rank, data.numel()
        chunk = width(size) * size
        others = [r for r in range(size) if r != root] if rank == root and verdict == PUSHED else []
        peers = [offers.peer(r, meeting, 0, nbytes) for r in (others if rank == root else [root])]
        for start in range(0, nbytes, chunk):
            stop = min(start + chunk, nbytes)
            middle = stop - (share(stop - start, size) if verdict == PUSHED else 0)
            if rank != root:
                data[start:middle].copy_(peers[0][start:middle])
            for peer in peers if rank == root else []:
                peer[middle:stop].copy_(data[middle:stop])
            yield

    return program

"""Collectives over the board, each a program: a generator that stages data, meets (``yield``), and collects.

A program knows nothing of waiting, errors or threads; the lane that runs it does (lane.py). Between two meetings it may
write its own half of its own staging area, read everybody's area of the meeting just passed, and, in the two-phase
programs, write results back into its peers' areas (*mailbox*: a line that another core has read is slow to store to
again, one that it has written is not). Board parity makes one meeting per exchange enough (transport/board.py).

Data that is only moved travels as flat uint8 tensors, whatever its dtype. Data that is reduced travels flat in its own.
"""

from collections.abc import Generator, Sequence

import torch

from unisono.run.reduce import Reducer
from unisono.transport.board import Board
from unisono.watch.call import Call

__all__ = [
    "Program",
    "all_gather",
    "all_gather_flat",
    "all_reduce",
    "barrier",
    "broadcast",
    "exchange",
    "one_shot",
    "reduce_scatter",
]

Program = Generator[None, None, None]

_ONE_SHOT = 128 * 1024


def one_shot(nbytes: int, world_size: int) -> bool:
    """Whether a reduction is so small that every rank reduces all of it: one meeting, not two, for n times the work."""
    return nbytes * world_size <= _ONE_SHOT


def barrier(board: Board) -> Program:
    """One meeting, no data."""
    yield


def broadcast(board: Board, root: int, data: torch.Tensor) -> Program:
    """``data`` (uint8, flat) of ``root`` to everybody, a staging area at a time; the root stages while others copy."""
    limit = board.stage_nbytes
    for start in range(0, max(1, data.numel()), limit):
        part, half = data[start : start + limit], board.half
        area = board.stages[half, root, : part.numel()]
        if board.rank == root:
            area.copy_(part)
        yield
        if board.rank != root:
            part.copy_(area)


def all_gather(board: Board, mine: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Program:
    """``mine`` (uint8, flat) of every rank into ``outputs`` (one per rank, sizes may differ)."""
    limit = board.stage_nbytes
    longest = max(output.numel() for output in outputs)
    for start in range(0, max(1, longest), limit):
        half, part = board.half, mine[start : start + limit]
        board.stages[half, board.rank, : part.numel()].copy_(part)
        yield
        for rank, output in enumerate(outputs):
            target = output[start : start + limit]
            if target.numel():
                target.copy_(board.stages[half, rank, : target.numel()])


def all_gather_flat(board: Board, mine: torch.Tensor, output: torch.Tensor) -> Program:
    """As `all_gather` for equal sizes and one output (uint8, world size × bytes): one copy for all ranks."""
    limit = board.stage_nbytes
    for start in range(0, max(1, mine.numel()), limit):
        half, part = board.half, mine[start : start + limit]
        board.stages[half, board.rank, : part.numel()].copy_(part)
        yield
        output[:, start : start + limit].copy_(board.stages[half, :, : part.numel()])


def exchange(
    board: Board,
    call: Call,
    sends: Sequence[torch.Tensor | None],
    receives: Sequence[torch.Tensor | None],
    slots: int,
) -> Program:
    """``sends[j]`` of rank i to ``receives[i]`` of rank j (uint8, flat): gather, scatter and all_to_all of any sizes.

    The staging area is cut into ``slots``: one where all senders have a single receiver, else one per receiver. How
    many rounds there are follows from the longest piece of all, which the headers tell at the first meeting.
    """
    rank, itemsize = board.rank, call.dtype.itemsize if call.dtype else 1
    width = board.stage_nbytes // slots // 64 * 64
    start, rounds = 0, 1
    while start < rounds * width:
        half = board.half
        for peer, data in enumerate(sends):
            if data is not None and peer != rank and data.numel() > start:
                part, at = data[start : start + width], (peer % slots) * width
                board.stages[half, rank, at : at + part.numel()].copy_(part)
        yield
        if start == 0:
            rounds = max(1, -(-call.longest * itemsize // width))
            mine, own = sends[rank], receives[rank]
            if mine is not None and own is not None:
                own.copy_(mine)
        for peer, data in enumerate(receives):
            if data is not None and peer != rank and data.numel() > start:
                part, at = data[start : start + width], (rank % slots) * width
                part.copy_(board.stages[half, peer, at : at + part.numel()])
        start += width


def all_reduce(
    board: Board, source: torch.Tensor, result: torch.Tensor | None, combine: Reducer, root: int | None = None
) -> Program:
    """The combination of all ``source`` (flat) into ``result`` (flat, may be ``source``) of every rank, or of ``root``.

    Where `one_shot` says so everybody stages all and reduces all; above, everybody reduces its own part of all
    (two-phase: direct reduce-scatter and all-gather, chunk by chunk).
    """
    if not one_shot(source.nbytes, board.size):
        yield from _two_phase(board, source, result, combine, range(board.size) if root is None else (root,))
        return
    parts = board.parts(source.numel(), source.dtype)[board.half]
    parts[board.rank].copy_(combine.prepared(source))
    yield
    if result is not None:
        combine(parts, result)


def _two_phase(
    board: Board, source: torch.Tensor, result: torch.Tensor | None, combine: Reducer, targets: Sequence[int]
) -> Program:
    """Chunk k is staged before meeting k, reduced before meeting k + 1, copied out after it: three stages at work."""
    size, rank, boxes = board.size, board.rank, board.typed(source.dtype)
    part = boxes.shape[2] // size // 64 * 64
    width, total = part * size, source.numel()
    mine = combine.prepared(source)
    chunks = -(-total // width)
    others = [(0, rank * part), ((rank + 1) * part, width)]

    def span(chunk: int, first: int, last: int) -> tuple[slice, slice] | None:
        """The same elements in the tensor and in a box, or None where the tensor has ended."""
        start, stop = chunk * width + first, min(chunk * width + last, total)
        return (slice(start, stop), slice(first, first + stop - start)) if stop > start else None

    def reduce(chunk: int, half: int) -> None:
        here = span(chunk, rank * part, (rank + 1) * part)
        if here is None:
            return
        inside, box = here
        parts = [mine[inside] if peer == rank else boxes[half, peer, box] for peer in range(size)]
        first = result[inside] if result is not None else boxes[half, targets[0], box]
        combine(parts, first)
        for peer in targets:
            if peer != rank and not (result is None and peer == targets[0]):
                boxes[half, peer, box].copy_(first)

    before = board.half
    for chunk in range(chunks + 1):
        half = board.half
        if chunk < chunks:
            for first, last in others:
                if (here := span(chunk, first, last)) is not None:
                    boxes[half, rank, here[1]].copy_(mine[here[0]])
        if chunk > 0:
            reduce(chunk - 1, before)
        yield
        if chunk > 0 and result is not None:
            for first, last in others:
                if (here := span(chunk - 1, first, last)) is not None:
                    result[here[0]].copy_(boxes[before, rank, here[1]])
        before = half


def reduce_scatter(board: Board, inputs: Sequence[torch.Tensor], result: torch.Tensor, combine: Reducer) -> Program:
    """The combination of every rank's ``inputs[r]`` (flat) into rank r's ``result``; sizes may differ by r."""
    size, rank, boxes = board.size, board.rank, board.typed(result.dtype)
    width = boxes.shape[2] // size // 64 * 64
    longest = max(data.numel() for data in inputs)
    for start in range(0, max(1, longest), width):
        half = board.half
        for peer, data in enumerate(inputs):
            part = data[start : start + width]
            if peer != rank and part.numel():
                boxes[half, rank, peer * width : peer * width + part.numel()].copy_(combine.prepared(part))
        yield
        target = result[start : start + width]
        if target.numel():
            own, at = (
                combine.prepared(inputs[rank][start : start + width]),
                slice(rank * width, rank * width + target.numel()),
            )
            combine([own if peer == rank else boxes[half, peer, at] for peer in range(size)], target)

"""A rank's own tensors to the bytes of a chunk and back: through strides, permuted, cast and quantised on the way.

A `Move` is one block: where it lies in the chunk, where in the rank's own tensor. `Packer` and `Unpacker` are moves
bound to tensors. Blocks that follow each other both in memory and in the chunk move as one; many small ones by one
`torch.cat`.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.errors import UsageError
from unisono.weights.checksum import Checker
from unisono.weights.regions import Cast, Op, Quantize

__all__ = ["Move", "Packer", "Unpacker", "view_of"]

Shape = tuple[int, ...]


class Move(NamedTuple):
    """A block of a chunk: `start` is its first byte there, `shape` its shape there, in order, of `dtype`.

    name: of the rank's own tensor. at: the block's offsets in it, in that tensor's dims; dims: dim i of the block is
    dim dims[i] of the tensor. ops: what is done to its elements when it is packed.
    """

    start: int
    shape: Shape
    dtype: torch.dtype
    name: str
    at: Shape
    dims: Shape
    ops: tuple[Op, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the block in the chunk."""
        return prod(self.shape) * self.dtype.itemsize


def view_of(move: Move, tensor: Tensor) -> Tensor:
    """The block as it lies in the rank's own tensor, its dims as in the chunk."""
    if move.shape == tuple(tensor.shape) and move.dims == tuple(range(tensor.dim())):
        return tensor
    extent = [0] * tensor.dim()
    for i, dim in enumerate(move.dims):
        extent[dim] = move.shape[i]
    for dim, (at, length) in enumerate(zip(move.at, extent, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, at, length)
    return tensor.permute(move.dims)


def computed(move: Move, block: Tensor, scales: Mapping[str, Tensor]) -> Tensor:
    """A block after its operations."""
    for op in move.ops:
        block = block.to(op.dtype) if isinstance(op, Cast) else _quantized(op, block, scales[op.scale])
    return block


def _quantized(op: Quantize, block: Tensor, scale: Tensor) -> Tensor:
    if op.axis is not None:
        lines = [1] * block.dim()
        lines[op.axis] = block.shape[op.axis]
        scale = scale.reshape(-1)[op.start : op.start + block.shape[op.axis]].view(lines)
    divided = block.to(torch.float32) / scale
    if op.dtype == torch.int8:
        return divided.round_().clamp_(-128, 127).to(torch.int8)
    limit = torch.finfo(op.dtype).max
    return divided.clamp_(-limit, limit).to(op.dtype)


_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_AT_ONCE = 1 << 20
"""Bytes after which checksums are taken, while what was moved is in the cache."""


class _Step(NamedTuple):
    """Bytes start .. stop of a chunk and where they lie: flat tensors of one dtype, or the block of a move."""

    start: int
    stop: int
    dtype: torch.dtype
    views: list[Tensor]
    move: Move | None = None


def _is_plain(move: Move, view: Tensor) -> bool:
    """True if a block is one run of memory and its bytes are those of the chunk."""
    return not move.ops and view.is_contiguous() and not (view.is_conj() or view.is_neg())


def _runs(moves: Sequence[Move], tensors: Mapping[str, Tensor]) -> Iterator[_Step]:
    """Moves in order, plain ones of one item size together, as one tensor where memory goes on."""
    last: _Step | None = None
    for move in moves:
        view = view_of(move, tensors[move.name])
        start, stop, unit = move.start, move.start + move.nbytes, _UNITS[move.dtype.itemsize]
        if not _is_plain(move, view):
            if last is not None:
                yield last
            last = None
            yield _Step(start, stop, move.dtype, [view], move)
            continue
        flat = view.as_strided((view.numel(),), (1,)).view(unit)
        if last is None or last.dtype != unit or last.stop != start:
            if last is not None:
                yield last
            last = _Step(start, stop, unit, [flat])
            continue
        _append(last.views, flat)
        last = last._replace(stop=stop)
    if last is not None:
        yield last


def _append(views: list[Tensor], view: Tensor) -> None:
    """Add a flat tensor to others, to the last of them if it follows it in memory."""
    last = views[-1]
    follows = view.data_ptr() == last.data_ptr() + last.numel() * last.itemsize
    if follows and view.untyped_storage()._cdata == last.untyped_storage()._cdata:
        views[-1] = last.as_strided((last.numel() + view.numel(),), (1,))
    else:
        views.append(view)


def _steps(run: _Step) -> Iterator[_Step]:
    """A run in steps that stay in the cache."""
    if run.move is not None:
        yield run
        return
    size = run.dtype.itemsize
    each, start = _AT_ONCE // size, run.start
    views: list[Tensor] = []
    count = 0
    for view in (
        part for whole in run.views for part in (torch.split(whole, each) if whole.numel() > each else (whole,))
    ):
        if views and count + view.numel() > each:
            yield _Step(start, start + count * size, run.dtype, views)
            start, views, count = start + count * size, [], 0
        views.append(view)
        count += view.numel()
    yield _Step(start, run.stop, run.dtype, views)


class _Bound:
    """Moves bound to tensors, for as long as these stay where they are."""

    def __init__(self, moves: Sequence[Move], tensors: Mapping[str, Tensor]) -> None:
        runs = list(_runs(moves, tensors))
        self.nbytes = moves[-1].start + moves[-1].nbytes if moves else 0
        self._whole = runs[0].views[0] if len(runs) == 1 and runs[0].move is None and len(runs[0].views) == 1 else None
        self._steps = [step for run in runs for step in _steps(run)]

    @property
    def whole(self) -> Tensor | None:
        """The chunk's bytes as they lie in the tensors, uint8, if that is one run of memory; else None."""
        return None if self._whole is None else self._whole.view(torch.uint8)


class Packer(_Bound):
    """Writes a chunk from the source's own tensors. scales: float32, by the names that Quantize has."""

    def __init__(
        self, moves: Sequence[Move], tensors: Mapping[str, Tensor], scales: Mapping[str, Tensor] | None = None
    ) -> None:
        self._scales = dict(scales or {})
        super().__init__(moves, {**tensors, **self._scales})

    def pack(self, chunk: Tensor, checker: Checker | None = None) -> None:
        """Write the bytes of the chunk into `chunk`, uint8, contiguous, of `nbytes` or more.

        checker: of the chunk's blocks, whose sums are taken on the way.
        """
        for step in self._steps:
            out = chunk[step.start : step.stop].view(step.dtype)
            if step.move is not None:
                out.view(step.move.shape).copy_(computed(step.move, step.views[0], self._scales))
            elif len(step.views) == 1:
                out.copy_(step.views[0])
            else:
                torch.cat(step.views, out=out)
            if checker is not None:
                checker.until(step.stop)


class Unpacker(_Bound):
    """Reads a chunk into a target's own tensors. Raises UsageError for one whose elements share memory."""

    def __init__(self, moves: Sequence[Move], tensors: Mapping[str, Tensor]) -> None:
        super().__init__(moves, tensors)
        for move, view in ((step.move, step.views[0]) for step in self._steps):
            if move is not None and any(n > 1 and not s for n, s in zip(view.shape, view.stride(), strict=True)):
                raise UsageError(
                    f"{move.name} is an expanded tensor, whose elements share memory: nothing can be received into "
                    "it, use a copy (.contiguous())"
                )

    def unpack(self, chunk: Tensor, checker: Checker | None = None) -> None:
        """Read the bytes of the chunk, uint8, contiguous, into the tensors.

        checker: of the blocks where they land, whose sums are taken on the way.
        """
        for step in self._steps:
            flat = chunk[step.start : step.stop].view(step.dtype)
            if step.move is not None:
                step.views[0].copy_(flat.view(step.move.shape))
            elif len(step.views) == 1:
                step.views[0].copy_(flat)
            else:
                torch.split_with_sizes_copy(flat, [view.numel() for view in step.views], out=step.views)
            if checker is not None:
                checker.until(step.stop)

"""A rank's own tensors to the bytes of a chunk and back: through strides, permuted, cast and quantised on the way.

A `Move` is one block: where it lies in the chunk, where in the rank's own tensor. `Packer` and `Unpacker` are moves
bound to tensors. Blocks that follow each other both in memory and in the chunk move as one; many small ones by one
`torch.cat`.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

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
        if isinstance(op, Cast):
            block = block.to(op.dtype)
        else:
            block = _quantized(op, block, scales[op.scale])
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


class _Run(NamedTuple):
    """Moves that go together: bytes start .. stop of the chunk, and flat tensors of one dtype."""

    start: int
    stop: int
    dtype: torch.dtype
    moves: list[Move]
    views: list[Tensor]
    plain: bool


def _runs(moves: Sequence[Move], tensors: Mapping[str, Tensor]) -> list[_Run]:
    """Moves in order, in runs: plain ones (contiguous, nothing to compute) of one dtype, joined where memory goes on."""
    runs: list[_Run] = []
    for move in moves:
        view = view_of(move, tensors[move.name])
        plain = not move.ops and view.is_contiguous()
        start, stop = move.start, move.start + move.nbytes
        last = runs[-1] if runs else None
        if last is None or not plain or not last.plain or last.dtype != move.dtype or last.stop != start:
            runs.append(_Run(start, stop, move.dtype, [move], [view.view(-1) if plain else view], plain))
            continue
        _append(last.views, view)
        last.moves.append(move)
        runs[-1] = last._replace(stop=stop)
    return runs


def _append(views: list[Tensor], view: Tensor) -> None:
    """Add a contiguous block to flat ones, to the last of them if it follows it in memory."""
    last, length = views[-1], view.numel()
    if view.data_ptr() == last.data_ptr() + last.numel() * last.itemsize and (
        view.untyped_storage()._cdata == last.untyped_storage()._cdata
    ):
        views[-1] = last.as_strided((last.numel() + length,), (1,))
    else:
        views.append(view.view(-1))


class _Bound:
    """Moves bound to tensors, for as long as these stay where they are."""

    def __init__(self, moves: Sequence[Move], tensors: Mapping[str, Tensor]) -> None:
        self.runs = _runs(moves, tensors)
        self.nbytes = moves[-1].start + moves[-1].nbytes if moves else 0

    def _flat(self, run: _Run, chunk: Tensor) -> Tensor:
        return chunk[run.start : run.stop].view(run.dtype)


class Packer(_Bound):
    """Writes a chunk from the source's own tensors. scales: float32, by the names that Quantize has."""

    def __init__(
        self, moves: Sequence[Move], tensors: Mapping[str, Tensor], scales: Mapping[str, Tensor] | None = None
    ) -> None:
        known = dict(scales or {})
        super().__init__(moves, {**tensors, **known})
        self.scales = known

    def whole(self) -> Tensor | None:
        """The chunk's bytes where they lie, uint8, if they do so one after the other; else None: they must be packed."""
        if len(self.runs) == 1 and self.runs[0].plain and len(self.runs[0].views) == 1:
            return self.runs[0].views[0].view(torch.uint8)
        return None

    def pack(self, chunk: Tensor) -> None:
        """Write the bytes of the chunk into `chunk`, uint8, contiguous, of at least `nbytes`."""
        for run in self.runs:
            out = self._flat(run, chunk)
            if not run.plain:
                block = computed(run.moves[0], run.views[0], self.scales)
                out.view(run.moves[0].shape).copy_(block)
            elif len(run.views) == 1:
                out.copy_(run.views[0])
            else:
                torch.cat(run.views, out=out)


class Unpacker(_Bound):
    """Reads a chunk into a target's own tensors."""

    def whole(self) -> Tensor | None:
        """Where the chunk's bytes may be received at once, uint8, if that is one run of memory; else None."""
        if len(self.runs) == 1 and self.runs[0].plain and len(self.runs[0].views) == 1:
            return self.runs[0].views[0].view(torch.uint8)
        return None

    def unpack(self, chunk: Tensor) -> None:
        """Read the bytes of the chunk, uint8, contiguous, into the tensors."""
        for run in self.runs:
            flat = self._flat(run, chunk)
            if not run.plain:
                run.views[0].copy_(flat.view(run.moves[0].shape))
            elif len(run.views) == 1:
                run.views[0].copy_(flat)
            else:
                torch.split_with_sizes_copy(flat, [view.numel() for view in run.views], out=run.views)

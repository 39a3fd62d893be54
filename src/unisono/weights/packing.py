"""A rank's own tensors to the bytes of a chunk and back: through strides, permuted, cast and quantised on the way.

A `Move` is one block: where it lies in the chunk, where in the rank's own tensor. `Packer` and `Unpacker` are moves
bound to tensors. Blocks whose bytes are those of the chunk, in runs, go by one call of the loop that copies and sums
(rows.py), however many they are; those that are cast, quantised or turned go one by one.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.errors import UsageError
from unisono.weights.checksum import whole_place
from unisono.weights.regions import Cast, Op, Quantize
from unisono.weights.rows import Place, Rows, contiguous, rows_of

__all__ = ["Move", "Packer", "Unpacker", "view_of"]

Shape = tuple[int, ...]


class Move(NamedTuple):
    """A block of a chunk: `start` is its first byte there, `shape` its shape there, in order, of `dtype`.

    name: of the rank's own tensor. at: the block's offsets in it, in that tensor's dims; dims: dim i of the block is
    dim dims[i] of the tensor. ops: what is done to its elements when it is packed. offsets, whole: of the block in the
    receiver's whole tensor, and the shape of that, for checksums. strides: in bytes, where it has gaps in the chunk.
    """

    start: int
    shape: Shape
    dtype: torch.dtype
    name: str
    at: Shape
    dims: Shape
    ops: tuple[Op, ...] = ()
    offsets: Shape = ()
    whole: Shape = ()
    strides: Shape | None = None

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


_LEAST_RUN, _MANY = 32, 256
"""A block of more than so many runs of fewer bytes is copied by torch."""


class _Loose(NamedTuple):
    """A block that torch copies, and the rows that sum it, which count from `base`: the chunk, or a copy of it."""

    move: Move
    view: Tensor
    summed: Rows


class _Bound:
    """Moves bound to tensors, for as long as these stay where they are. sums: the byte of each move's word of sums."""

    _packs: bool

    def __init__(self, moves: Sequence[Move], tensors: Mapping[str, Tensor], sums: Sequence[int] = ()) -> None:
        self.nbytes = moves[-1].start + moves[-1].nbytes if moves else 0
        self._kept: list[Tensor] = []
        self._loose: list[_Loose] = []
        rows: list[list[int]] = []
        for move, word in zip(moves, sums or (0,) * len(moves), strict=True):
            view = view_of(move, tensors[move.name])
            self._check(move, view)
            found = self._rows(move, view, word)
            if found is None:
                self._loose.append(_Loose(move, view, self._summed(move, word)))
                continue
            self._kept.append(view)
            rows += found
        self._table = Rows(rows)

    def _check(self, move: Move, view: Tensor) -> None:
        """Refuses a block that can not be bound."""

    def _rows(self, move: Move, view: Tensor, word: int) -> list[list[int]] | None:
        """The rows of a block whose bytes are those of the chunk, in runs that are worth it; else None."""
        if move.ops or view.device.type != "cpu" or view.is_conj() or view.is_neg():
            return None
        size = move.dtype.itemsize
        own = Place(view.data_ptr(), tuple(size * step for step in view.stride()))
        chunk = _in_chunk(move)
        ends = (own, chunk) if self._packs else (chunk, own)
        rows = rows_of(move.shape, size, *ends, _in_whole(move), word)
        short = any(row[2] < _LEAST_RUN and row[2] * _MANY < move.nbytes for row in rows)
        return None if short and not view.is_contiguous() else rows

    def _summed(self, move: Move, word: int) -> Rows:
        """The rows that sum a block: in the chunk that is packed, or in a copy of what was unpacked."""
        chunk = _in_chunk(move) if self._packs else Place(0, contiguous(move.shape, move.dtype.itemsize))
        return Rows(rows_of(move.shape, move.dtype.itemsize, chunk, chunk, _in_whole(move), word))


def _in_chunk(move: Move) -> Place:
    strides = contiguous(move.shape, move.dtype.itemsize) if move.strides is None else move.strides
    return Place(move.start, strides)


def _in_whole(move: Move) -> Place:
    size = move.dtype.itemsize
    return whole_place(move.offsets, move.whole, size) if move.whole else Place(0, contiguous(move.shape, size))


def _block_of(move: Move, chunk: Tensor) -> Tensor:
    """A block as it lies in a chunk."""
    size = move.dtype.itemsize
    if move.strides is None:
        return chunk[move.start : move.start + move.nbytes].view(move.dtype).view(move.shape)
    steps = [step // size for step in move.strides]
    rest = chunk[move.start : move.start + (chunk.numel() - move.start) // size * size]
    return rest.view(move.dtype).as_strided(move.shape, steps)


class Packer(_Bound):
    """Writes a chunk from the source's own tensors. scales: float32, by the names that Quantize has."""

    _packs = True

    def __init__(
        self,
        moves: Sequence[Move],
        tensors: Mapping[str, Tensor],
        scales: Mapping[str, Tensor] | None = None,
        sums: Sequence[int] = (),
    ) -> None:
        self._scales = dict(scales or {})
        super().__init__(moves, {**tensors, **self._scales}, sums)

    def pack(self, chunk: Tensor, sums: int = 0, past: bool = False) -> None:
        """Write the bytes of the chunk into `chunk`, uint8, of `nbytes` or more.

        sums: the address from which the words of sums count, to which those of what was written are added. past: as
        `Rows.move` has it.
        """
        self._table.move(0, chunk.data_ptr(), sums, past)
        self._pack_loose(chunk, sums)

    def sum(self, chunk: Tensor, sums: int) -> None:
        """Add the sums where the tensors lie; only what can not be summed there is packed into `chunk`."""
        self._table.sum(0, sums)
        self._pack_loose(chunk, sums)

    def _pack_loose(self, chunk: Tensor, sums: int) -> None:
        for move, view, summed in self._loose:
            _block_of(move, chunk).copy_(computed(move, view, self._scales))
            if sums:
                summed.sum(chunk.data_ptr(), sums)


class Unpacker(_Bound):
    """Reads a chunk into a target's own tensors. Raises UsageError for one whose elements share memory."""

    _packs = False

    def _check(self, move: Move, view: Tensor) -> None:
        if any(n > 1 and not step for n, step in zip(view.shape, view.stride(), strict=True)):
            raise UsageError(
                f"{move.name} is an expanded tensor, whose elements share memory: nothing can be received into "
                "it, use a copy (.contiguous())"
            )

    def unpack(self, chunk: Tensor, sums: int = 0, past: bool = False) -> None:
        """Read the bytes of the chunk, uint8, into the tensors.

        sums: the address from which the words of sums count, to which those of what has landed are added. past: as
        `Rows.move` has it.
        """
        self._table.move(chunk.data_ptr(), 0, sums, past)
        for move, view, summed in self._loose:
            view.copy_(_block_of(move, chunk))
            if sums:
                copy = view.detach().to("cpu").contiguous()
                summed.sum(copy.data_ptr(), sums)

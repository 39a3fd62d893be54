"""A split linear layer's communication overlapped with its products, eagerly; torch does that in compiled CUDA code.

| function | weight cut by | forward | backward |
| --- | --- | --- | --- |
| `column_linear` | output | x wᵀ | all_reduce of dx, during dw |
| `row_linear` | input | x wᵀ, all_reduce | nothing |
| `gather_column_linear` | output | all_gather of x, x wᵀ | all_gather of x, during dx; reduce_scatter of dx |
| `row_scatter_linear` | input | x wᵀ, reduce_scatter | all_gather of dy, dx and dw |

`chunks` cuts the rows into so many pieces: while one piece is on its way the next is multiplied. Where that pays, and
where it costs, was measured: docs/parallel.md. The last two gather and scatter dim 0 (the sequence); pieces need parts
of equal length, uneven ones go in one piece. x is saved as the rank's own part and gathered again in backward
(Korthikanti et al. 2022, section 4.2.2).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from unisono.parallel.shards import Group, apply
from unisono.parallel.tensor.regions import start_all_gather, start_reduce_scatter

__all__ = ["column_linear", "gather_column_linear", "row_linear", "row_scatter_linear"]


def _pieces(total: int, chunks: int) -> Iterator[slice]:
    """`total` rows in at most `chunks` slices of nearly equal length."""
    size = -(-total // chunks) or 1
    return (slice(start, start + size) for start in range(0, total, size))


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _multiply_and_sum(left: Tensor, right: Tensor, group: Group, chunks: int) -> tuple[Tensor, list[dist.Work]]:
    """left @ right for rows of `left`; each piece's all_reduce begins as soon as it is there."""
    left = _rows(left)
    product = left.new_empty(left.shape[0], right.shape[1])
    works: list[dist.Work] = []
    for piece in _pieces(left.shape[0], chunks):
        torch.mm(left[piece], right, out=product[piece])
        works.append(dist.all_reduce(product[piece], group=group, async_op=True))
    return product, works


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, chunks: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.chunks = group, chunks
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        to_x: Tensor | None = None
        works: list[dist.Work] = []
        if ctx.needs_input_grad[0]:
            to_x, works = _multiply_and_sum(gradient, weight, ctx.group, ctx.chunks)
            to_x = to_x.view(x.shape)
        to_weight = _rows(gradient).T @ _rows(x) if ctx.needs_input_grad[1] else None
        to_bias = _rows(gradient).sum(0) if ctx.needs_input_grad[2] else None
        for work in works:
            work.wait()
        return to_x, to_weight, to_bias, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Group, chunks: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        product, works = _multiply_and_sum(x, weight.T, group, chunks)
        for work in works:
            work.wait()
        return product.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        to_x = gradient @ weight if ctx.needs_input_grad[0] else None
        to_weight = _rows(gradient).T @ _rows(x) if ctx.needs_input_grad[1] else None
        return to_x, to_weight, None, None


class _Walk:
    """Dim 0 in pieces that are the same rows of every rank's part; one piece, the whole, if the parts are uneven."""

    def __init__(self, lengths: Sequence[int], chunks: int, group: Group) -> None:
        self.lengths, self.group = lengths, group
        self.in_pieces = min(lengths) == max(lengths) and chunks > 1 and max(lengths) > 1
        self.pieces = list(_pieces(lengths[0], chunks)) if self.in_pieces else [slice(None)]

    def pick(self, whole: Tensor, piece: slice) -> Tensor:
        """The piece's rows of every rank's part, side by side."""
        return torch.unflatten(whole, 0, (len(self.lengths), -1))[:, piece].flatten(0, 1) if self.in_pieces else whole

    def put(self, whole: Tensor, piece: slice, rows: Tensor) -> None:
        """Write what `pick` would read."""
        if self.in_pieces:
            part = torch.unflatten(whole, 0, (len(self.lengths), -1))[:, piece]
            part.copy_(rows.view(part.shape))
        else:
            whole.copy_(rows)

    def gathered(self, part: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Every piece of the gathered whole; the gathering of later pieces goes on meanwhile."""
        on_their_way = []
        for piece in self.pieces:
            rows = part[piece]
            on_their_way.append(start_all_gather(rows, self._lengths(rows.shape[0]), self.group))
        for piece, finish in zip(self.pieces, on_their_way, strict=True):
            yield piece, finish()

    def scattered(self, products: Iterator[Tensor]) -> Iterator[Tensor]:
        """Sum and scatter each piece while the next product is computed; the pieces of the own part, in order."""
        on_their_way = [
            start_reduce_scatter(rows, self._lengths(rows.shape[0] // len(self.lengths)), self.group)
            for rows in products
        ]
        return (finish() for finish in on_their_way)

    def _lengths(self, own_rows: int) -> Sequence[int]:
        """Of every rank's rows in a piece, of which this rank has so many."""
        return [own_rows] * len(self.lengths) if self.in_pieces else self.lengths


class _GatherColumn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, walk: _Walk) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.walk = walk
        if not walk.in_pieces:
            return F.linear(start_all_gather(x, walk.lengths, walk.group)(), weight, bias)
        result = x.new_empty(sum(walk.lengths), *x.shape[1:-1], weight.shape[0])
        for piece, rows in walk.gathered(x):
            walk.put(result, piece, F.linear(rows, weight, bias))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        walk: _Walk = ctx.walk
        to_x = to_weight = None
        whole_x = start_all_gather(x, walk.lengths, walk.group) if ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[0]:
            parts = walk.scattered(walk.pick(gradient, piece) @ weight for piece in walk.pieces)
        if whole_x is not None:
            to_weight = _rows(gradient).T @ _rows(whole_x())
        to_bias = _rows(gradient).sum(0) if ctx.needs_input_grad[2] else None
        if ctx.needs_input_grad[0]:
            to_x = torch.cat(list(parts))
        return to_x, to_weight, to_bias, None


class _RowScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, walk: _Walk) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.walk = walk
        return torch.cat(list(walk.scattered(walk.pick(x, piece) @ weight.T for piece in walk.pieces)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        walk: _Walk = ctx.walk
        to_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for piece, rows in walk.gathered(gradient):
            if to_x is not None:
                walk.put(to_x, piece, rows @ weight)
            if to_weight is not None:
                to_weight.addmm_(_rows(rows).T, _rows(walk.pick(x, piece)))
        return to_x, to_weight, None


def _as_autocast_wants(*tensors: Tensor | None) -> list[Any]:
    """The operands in the dtype that autocast would multiply in, where it is on; it leaves float64 as it is."""
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: Group, chunks: int) -> Tensor:
    """This rank's outputs of an x that all ranks have: [..., in] → [..., own out]; weight [own out, in]."""
    return apply(_Column, *_as_autocast_wants(x, weight, bias), group, chunks)


def row_linear(x: Tensor, weight: Tensor, group: Group, chunks: int) -> Tensor:
    """The sum over the ranks of x wᵀ: x [..., own in] → [..., out]; weight [out, own in]."""
    return apply(_Row, *_as_autocast_wants(x, weight), group, chunks)


def gather_column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Sequence[int], group: Group, chunks: int
) -> Tensor:
    """`column_linear` of the parts of x, [own length, ..., in], gathered along dim 0: [sum of lengths, ..., out]."""
    return apply(_GatherColumn, *_as_autocast_wants(x, weight, bias), _Walk(lengths, chunks, group))


def row_scatter_linear(x: Tensor, weight: Tensor, lengths: Sequence[int], group: Group, chunks: int) -> Tensor:
    """`row_linear`, each rank getting its part of dim 0: [sum of lengths, ..., own in] → [own length, ..., out]."""
    return apply(_RowScatter, *_as_autocast_wants(x, weight), _Walk(lengths, chunks, group))

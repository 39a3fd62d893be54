"""Tensors of every memory layout, each inside a larger piece of memory whose every byte is watched."""

import math
from collections.abc import Callable

import torch

from contract.values import same_bytes

__all__ = ["LAYOUTS", "Laid", "lay"]

MARGIN = 5  # elements before and after: odd, so that nothing is aligned to more than one element
PATTERN = torch.arange(256).mul_(37).to(torch.uint8)


class Laid:
    """A tensor `view` of some layout within `memory`; `check` tells what changed that should not have."""

    def __init__(self, view: torch.Tensor, memory: torch.Tensor) -> None:
        self.view = view
        self.memory = memory
        self.before = memory.clone()

    def check(self, expected: torch.Tensor | None, rtol: float = 0.0) -> str:
        """Compare the view with `expected` (None: unchanged) and every byte outside with what it was."""
        now = self.memory.view(torch.uint8)
        if expected is not None:  # what may change is put back; all else must be as it was
            place = self.view.size(), self.view.stride(), self.view.storage_offset()
            now = self.memory.clone()
            now.as_strided(*place).copy_(self.before.as_strided(*place))
            now = now.view(torch.uint8)
        if not torch.equal(now, self.before.view(torch.uint8)):
            changed = (now != self.before.view(torch.uint8)).view(-1, self.memory.element_size()).any(1)
            words = "changed that are input only" if expected is None else "outside the result were written"
            return f"{int(changed.sum())} elements {words}"
        return "" if expected is None else _difference(self.view, expected, rtol)


def _difference(got: torch.Tensor, expected: torch.Tensor, rtol: float) -> str:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"got {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    if same_bytes(got, expected):
        return ""
    if got.dtype.is_floating_point or got.dtype.is_complex:
        wide = torch.complex128 if got.dtype.is_complex else torch.float64
        if torch.allclose(got.to(wide), expected.to(wide), rtol=rtol, atol=0.0, equal_nan=True):
            return ""  # -0.0 is 0.0, one NaN is as good as another
    return f"got {_start(got)}, expected {_start(expected)}"


def _start(x: torch.Tensor) -> str:
    flat = x.reshape(-1)
    return f"{flat[:8].tolist()}{'...' if flat.numel() > 8 else ''} {tuple(x.shape)}"


def _memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return 1-D memory of that many elements plus margins, filled with a pattern."""
    width = torch.empty(0, dtype=dtype).element_size()
    nbytes = (math.prod(shape) + 2 * MARGIN) * width
    pattern = PATTERN.repeat(nbytes // 256 + 1)[:nbytes]
    return (pattern & 1 if dtype is torch.bool else pattern).view(dtype)


def _inner(memory: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return memory[MARGIN : MARGIN + math.prod(shape)].view(shape)


def _contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Laid:
    memory = _memory(shape, dtype)
    return Laid(_inner(memory, shape), memory)


def _transposed(shape: tuple[int, ...], dtype: torch.dtype) -> Laid:
    memory = _memory(shape, dtype)
    inner = _inner(memory, shape[::-1])
    return Laid(inner.permute(tuple(reversed(range(len(shape))))), memory)


def _column(shape: tuple[int, ...], dtype: torch.dtype) -> Laid:
    memory = _memory((*shape, 3), dtype)
    return Laid(_inner(memory, (*shape, 3))[..., 1], memory)


def _step(shape: tuple[int, ...], dtype: torch.dtype) -> Laid:
    if not shape:
        return _contiguous(shape, dtype)
    doubled = (2 * shape[0], *shape[1:])
    memory = _memory(doubled, dtype)
    return Laid(_inner(memory, doubled)[::2], memory)


def _rows(shape: tuple[int, ...], dtype: torch.dtype) -> Laid:
    """Rows apart from each other: the inner dimension is dense, the outer is not."""
    if len(shape) < 2:
        return _step(shape, dtype)
    padded = (*shape[:-1], shape[-1] + 3)
    memory = _memory(padded, dtype)
    return Laid(_inner(memory, padded)[..., : shape[-1]], memory)


LAYOUTS: dict[str, Callable[[tuple[int, ...], torch.dtype], Laid]] = {
    "contiguous": _contiguous,
    "transposed": _transposed,
    "column": _column,
    "step": _step,
    "rows": _rows,
}


def lay(layout: str, shape: tuple[int, ...], dtype: torch.dtype, values: torch.Tensor | None = None) -> Laid:
    """Make a tensor of that layout and shape, holding `values` or a pattern.

    Layout "expanded" repeats the first row of `values` with stride 0 and serves for inputs only.
    """
    if layout == "expanded" and math.prod(shape) and shape:
        assert values is not None
        inner = lay("contiguous", (1, *shape[1:]), dtype, values[:1])
        return Laid(inner.view.expand(shape), inner.memory)
    laid = LAYOUTS.get(layout, _contiguous)(shape, dtype)
    if values is not None:
        laid.view.copy_(values)
        laid.before = laid.memory.clone()
    return laid

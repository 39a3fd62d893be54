"""Bytes of weights, gradients, optimizer states and activations of a rank, on the CPU too; torch has GPUs'."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

__all__ = ["ActivationMeter", "MemoryUse", "memory_use"]


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one rank; `activations` is the most that was kept for backward at any moment of a step."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.activations


class ActivationMeter:
    """Counts the bytes that autograd keeps for backward while the context is open: `nbytes` now, `peak` at most.

    Memory that several tensors share counts once, and that of `apart` (the weights) not at all. A pipeline that has
    more microbatches in flight shows more. Costs a Python call per tensor kept: for a step now and then.

        with ActivationMeter(model.parameters()) as meter:
            model.step(windows)
        print(meter.peak)
    """

    def __init__(self, apart: Iterable[Tensor] = ()) -> None:
        self.nbytes = self.peak = 0
        self._apart = {tensor.untyped_storage().data_ptr() for tensor in apart}
        self._uses: dict[int, int] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda kept: kept.tensor)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._hooks.__exit__(*details)

    def _pack(self, tensor: Tensor) -> "_Kept":
        storage = tensor.untyped_storage()
        place, nbytes = storage.data_ptr(), storage.nbytes()
        if place in self._apart or not place:
            return _Kept(tensor, None)
        if place not in self._uses:
            self.nbytes += nbytes
            self.peak = max(self.peak, self.nbytes)
        self._uses[place] = self._uses.get(place, 0) + 1

        def release() -> None:
            self._uses[place] -= 1
            if not self._uses[place]:
                del self._uses[place]
                self.nbytes -= nbytes

        return _Kept(tensor, release)


class _Kept:
    """A tensor that autograd keeps; tells when it is let go."""

    def __init__(self, tensor: Tensor, release: Callable[[], None] | None) -> None:
        self.tensor, self._release = tensor, release

    def __del__(self) -> None:
        if self._release is not None:
            self._release()


def memory_use(parameters: Iterable[nn.Parameter], optimizer: Optimizer, activations: int) -> MemoryUse:
    """The memory in use: weights, their gradients (also those just set to None: what a step needs), optimizer states.

    activations: an `ActivationMeter`'s peak.
    """
    weights = list(parameters)
    states: Iterable[Any] = (value for state in optimizer.state.values() for value in state.values())
    trained = sum(_nbytes(weight) for weight in weights if weight.requires_grad)
    kept = sum(_nbytes(value) for value in states if isinstance(value, torch.Tensor))
    return MemoryUse(sum(map(_nbytes, weights)), trained, kept, activations)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

"""The user's tensors as the programs want them: flat, contiguous, outside autograd; and back again.

A tensor that is contiguous takes part in place. Any other is copied to a flat one first and copied back last, through
its own strides, so that nothing outside the result is written. A result whose elements share memory is refused.
"""

from collections.abc import Callable, Sequence

import torch

from unisono.errors import UsageError
from unisono.run.programs import Program
from unisono.watch.call import name_of_dtype

__all__ = ["PLAIN", "Result", "as_bytes", "check", "flat_input", "ordinary", "overlap", "with_results"]

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types whose data lies where they say: a subclass may have it elsewhere, or none (fake tensors, DTensors)."""


def ordinary(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in memory as they are, side by side, for anybody to write."""
    return (
        tensor.is_cpu
        and tensor.is_contiguous()
        and tensor.layout is torch.strided
        and not (tensor.is_inference() or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
    )


def check(tensor: torch.Tensor, what: str) -> None:
    """Raises `UsageError` for what this backend does not carry."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{what} must be a tensor, not {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise UsageError(f"{what} is on {tensor.device}: unisono carries CPU tensors; move it with .cpu()")
    if tensor.layout != torch.strided:
        raise UsageError(f"{what} has layout {tensor.layout}: only all_reduce takes sparse tensors; use .to_dense()")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory outside autograd: writes do not count as a new version, as with torch's own backends."""
    if not tensor.is_inference():
        return tensor.data
    alias = torch.empty(0, dtype=tensor.dtype, device="cpu")
    alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    alias = alias.conj() if tensor.is_conj() else alias
    return alias._neg_view() if tensor.is_neg() else alias


def flat_input(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as a flat tensor, in place if they lie side by side."""
    plain = _plain(tensor)
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return _side_by_side(plain.contiguous())


def _side_by_side(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as a flat one of stride 1: of one element or none, torch calls any stride contiguous."""
    return tensor.as_strided((tensor.numel(),), (1,))


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """A flat tensor of any dtype as uint8."""
    return flat.view(torch.uint8)


def _shares_memory_with_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may lie in one place: sorted by stride, each dim must step over all smaller ones."""
    span = 0
    for stride, dim in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if dim > 1:
            if stride <= span:
                return True
            span += stride * (dim - 1)
    return False


class Result:
    """A tensor to be written: ``flat`` is what the program fills; `deliver` brings it to the tensor if need be."""

    __slots__ = ("flat", "tensor")

    def __init__(self, tensor: torch.Tensor, what: str, load: bool = False) -> None:
        check(tensor, what)
        plain = _plain(tensor)
        self.tensor: torch.Tensor | None = None
        if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
            self.flat = _side_by_side(plain)
            return
        if _shares_memory_with_itself(plain):
            raise UsageError(
                f"{what} ({name_of_dtype(plain.dtype)} {list(plain.shape)}, strides {list(plain.stride())}) is not "
                "contiguous and several of its elements share memory: a result needs a place for each; use .clone()"
            )
        self.tensor = plain
        self.flat = flat_input(plain).clone() if load else torch.empty(plain.numel(), dtype=plain.dtype, device="cpu")

    def deliver(self) -> None:
        """Copies the result to a tensor that is not contiguous."""
        if self.tensor is not None:
            self.tensor.copy_(self.flat.view(self.tensor.shape))


def with_results(program: Program, results: Sequence[Result]) -> Program:
    """The program, with delivery at its end where a result needs it."""
    late = [r for r in results if r.tensor is not None]
    return _deliver(program, [r.deliver for r in late]) if late else program


def _deliver(program: Program, steps: Sequence[Callable[[], None]]) -> Program:
    yield from program
    for step in steps:
        step()


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two flat contiguous tensors share bytes."""
    start, other = a.data_ptr(), b.data_ptr()
    return start < other + b.nbytes and other < start + a.nbytes

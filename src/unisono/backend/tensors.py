"""The user's tensors as the programs want them: flat, contiguous, outside autograd; and back again.

A tensor that is contiguous takes part in place. Any other is copied to a flat one first and copied back last, through
its own strides, so that nothing outside the result is written. A result whose elements share memory is refused.
"""

import sys
from collections.abc import Callable, Sequence

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from unisono.errors import UsageError
from unisono.runtime.call import name_of_dtype
from unisono.transport.inference import plain

__all__ = [
    "PLAIN",
    "Result",
    "as_bytes",
    "check",
    "check_memory",
    "flat_input",
    "late",
    "ordinary",
    "overlap",
    "separate",
]

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types whose data lies where they say: a subclass may have it elsewhere, or none (fake tensors, DTensors)."""
_kind = torch._C._dispatch_keys
_ORDINARY = set()
for _mode in (False, True):
    with torch.inference_mode(_mode):
        _ORDINARY.add(_kind(torch.empty(0, device="cpu")).raw_repr())


def ordinary(tensor: torch.Tensor) -> bool:
    """True if its elements lie in memory as they are, side by side.

    Not so where torch dispatches in another way than for these: sparse, nested, quantised and zero tensors, lazy
    conjugates, other devices.
    """
    return type(tensor) in PLAIN and _kind(tensor).raw_repr() in _ORDINARY and tensor.is_contiguous()


def check(tensor: torch.Tensor, what: str) -> None:
    """Raises `UsageError` for tensors that this backend does not take."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{what} must be a tensor, not {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise UsageError(f"{what} is on {tensor.device}: unisono carries CPU tensors; move it with .cpu()")
    if tensor.is_nested:
        raise UsageError(f"{what} is a nested tensor: its parts need not be alike on all ranks; give its .values()")
    if tensor.is_quantized:
        raise UsageError(f"{what} is quantised, with a scale that may differ by rank: give its .int_repr()")
    if tensor.layout != torch.strided:
        raise UsageError(
            f"{what} has layout {tensor.layout}: only all_reduce takes sparse tensors, of layout torch.sparse_coo; use "
            ".to_dense()"
        )
    if type(tensor) in PLAIN or not _wraps(tensor, what):
        check_memory(tensor, what)


def _wraps(tensor: torch.Tensor, what: str) -> bool:
    """True if it is a result of a functional collective, which torch unwraps; raises for another wrapper of tensors."""
    wrapper: bool = is_traceable_wrapper_subclass(tensor)
    if not wrapper:
        return False
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(tensor, AsyncCollectiveTensor):
        return True
    inner = ".to_local()" if hasattr(tensor, "to_local") else "these"
    raise UsageError(f"{what} is a {type(tensor).__name__}, whose values lie in tensors inside it: give {inner}")


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor outside autograd and inference mode; what a functional collective gives, once it is there."""
    wait = getattr(tensor, "trigger_wait", None) if type(tensor) not in PLAIN else None
    return plain(tensor if wait is None else wait())


def check_memory(tensor: torch.Tensor, what: str) -> None:
    """Raises `UsageError` for a tensor that has no memory, or has lost some (FSDP frees what it has gathered so)."""
    numel = tensor.numel()
    if not numel:
        return
    if type(tensor) in PLAIN and tensor.is_contiguous():
        end = (tensor.storage_offset() + numel) * tensor.itemsize
        if tensor.untyped_storage().nbytes() >= end and tensor.data_ptr():
            return
    text = f"{what} ({name_of_dtype(tensor.dtype)} {list(tensor.shape)})"
    if tensor._is_zerotensor():
        raise UsageError(f"{text} is one of torch's zero tensors, which have no memory; use .clone()")
    there = tensor.untyped_storage().nbytes()
    last = sum(stride * (dim - 1) for stride, dim in zip(tensor.stride(), tensor.shape, strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize
    if there < needed:
        raise UsageError(
            f"{text} needs {needed} bytes of its storage, which has been resized to {there}: resize it back first"
        )
    if _fake(tensor) or not tensor.data_ptr():
        raise UsageError(f"{text} is a {type(tensor).__name__} without memory, such as torch traces programs with")


def _fake(tensor: torch.Tensor) -> bool:
    """True if it is one of torch's fake tensors, which are not to be asked where they lie."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def flat_input(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as a flat tensor, in place if they lie side by side."""
    found = _whole(tensor)
    if found.is_conj() or found.is_neg():
        found = found.resolve_conj().resolve_neg()
    return _side_by_side(found.contiguous())


def _side_by_side(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as a flat one of stride 1: of one element or none, torch calls any stride contiguous."""
    return tensor.as_strided((tensor.numel(),), (1,))


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """A flat tensor of any dtype as uint8."""
    return flat.view(torch.uint8)


def _shares_memory_with_itself(tensor: torch.Tensor) -> bool:
    """True if two elements may lie in one place: sorted by stride, each dim must step over all smaller ones."""
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
        whole = _whole(tensor)
        self.tensor: torch.Tensor | None = None
        if whole.is_contiguous() and not whole.is_conj() and not whole.is_neg():
            self.flat = _side_by_side(whole)
            return
        if _shares_memory_with_itself(whole):
            raise UsageError(
                f"{what} ({name_of_dtype(whole.dtype)} {list(whole.shape)}, strides {list(whole.stride())}) is not "
                "contiguous and several of its elements share memory: a result needs a place for each; use .clone()"
            )
        self.tensor = whole
        self.flat = flat_input(whole).clone() if load else torch.empty(whole.numel(), dtype=whole.dtype, device="cpu")

    def deliver(self) -> None:
        """Copies the result to a tensor that is not contiguous."""
        if self.tensor is not None:
            self.tensor.copy_(self.flat.view(self.tensor.shape))


def separate(results: Sequence[Result], what: str) -> None:
    """Raises `UsageError` if two results share memory: for those that are not contiguous, where they begin."""
    spans = []
    for result in results:
        if result.flat.numel():
            at = result.flat if result.tensor is None else result.tensor
            spans.append((at.data_ptr(), at.nbytes if result.tensor is None else at.itemsize))
    end = 0
    for start, nbytes in sorted(spans):
        if start < end:
            raise UsageError(f"two of the {what} share memory: each needs a place of its own")
        end = max(end, start + nbytes)


def late(results: Sequence[Result]) -> list[Callable[[], object]]:
    """Functions that copy results to tensors that lie elsewhere."""
    return [result.deliver for result in results if result.tensor is not None]


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two flat contiguous tensors share bytes."""
    start, other = a.data_ptr(), b.data_ptr()
    return start < other + b.nbytes and other < start + a.nbytes

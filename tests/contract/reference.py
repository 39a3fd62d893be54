"""What a reduction must give, computed in full precision from all ranks' inputs and rounded once."""

import numpy as np
import torch

__all__ = ["reduce", "tolerance"]

_NUMPY = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
_BOOL = _NUMPY | {"SUM": np.logical_or, "PRODUCT": np.logical_and}


def reduce(op: str, inputs: list[torch.Tensor], factor: float = 1.0) -> torch.Tensor:
    """Reduce tensors of one shape and dtype; integers wrap, bool sums are logical or, NaN wins in MIN and MAX.

    AVG of integers is the wrapped sum, divided and cut towards zero. `factor` scales each input of PREMUL_SUM. The
    inputs of the suite are chosen so that sums and products are exact in float32, hence there is one right answer
    whatever the order.
    """
    dtype = inputs[0].dtype
    if dtype is torch.bool:
        return _fold(_BOOL[op], inputs)
    if not (dtype.is_floating_point or dtype.is_complex):
        return _cut(_fold(np.add, inputs), len(inputs)) if op == "AVG" else _fold(_NUMPY[op], inputs)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    widened = [x.to(wide) * (factor if op == "PREMUL_SUM" else 1) for x in inputs]
    total = _fold(_NUMPY["SUM" if op in ("AVG", "PREMUL_SUM") else op], widened)
    if op == "AVG":
        total = total / len(inputs)
    if dtype is torch.complex32:
        return torch.view_as_complex(torch.view_as_real(total).to(torch.float16))
    return total.to(dtype)


def _fold(function: np.ufunc, inputs: list[torch.Tensor]) -> torch.Tensor:
    arrays = [x.numpy() for x in inputs]
    total = arrays[0]
    for array in arrays[1:]:
        total = function(total, array)
    return torch.from_numpy(np.array(total, dtype=arrays[0].dtype))


def _cut(total: torch.Tensor, size: int) -> torch.Tensor:
    """Python's integers, which neither wrap nor round, divided and cut towards zero."""
    quotients = [abs(value) // size * (-1 if value < 0 else 1) for value in total.flatten().tolist()]
    return torch.tensor(quotients, dtype=total.dtype).view(total.shape)


def tolerance(op: str, dtype: torch.dtype) -> float:
    """Relative error allowed: none, but for AVG of floats, where one rounding more (times 1/n, or by n) is fair."""
    floating = dtype.is_floating_point or dtype.is_complex
    return 2 * torch.finfo(dtype).eps if op == "AVG" and floating else 0.0

"""Dtypes, the reduce ops that mean something on them, and reproducible data for both."""

import functools

import torch
import torch.distributed as dist

__all__ = ["DTYPES", "FLOAT8", "FLOATS", "INTEGERS", "OPS", "REDUCIBLE", "as_bytes", "data", "reduce_op", "same_bytes"]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX, *FLOAT8)

REDUCIBLE = {
    "SUM": (*FLOATS, *INTEGERS, torch.bool, *COMPLEX),
    "AVG": (*FLOATS, *INTEGERS, *COMPLEX),
    "PRODUCT": (*FLOATS, *INTEGERS, torch.bool, *COMPLEX),
    "MIN": (*FLOATS, *INTEGERS, torch.bool),
    "MAX": (*FLOATS, *INTEGERS, torch.bool),
    "BAND": (*INTEGERS, torch.bool),
    "BOR": (*INTEGERS, torch.bool),
    "BXOR": (*INTEGERS, torch.bool),
    "PREMUL_SUM": FLOATS,
}
OPS = tuple(REDUCIBLE)
FACTOR = 0.5  # of PREMUL_SUM
MAGNITUDES = torch.tensor([-2.0, -1.0, 1.0, 2.0])


def reduce_op(name: str) -> dist.ReduceOp:
    """Return torch's reduce op of that name (PREMUL_SUM with the suite's factor)."""
    return dist._make_nccl_premul_sum(FACTOR) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)


def data(dtype: torch.dtype, count: int, seed: int, op: str = "") -> torch.Tensor:
    """Return `count` reproducible values: any bit pattern for moving (no op), else values whose reduction is exact."""
    width = torch.empty(0, dtype=dtype).element_size()
    if dtype is torch.bool:
        return _bytes(count, seed).lt(128)
    if not op or dtype in INTEGERS:
        return _bytes(count * width, seed).clone().view(dtype)
    if dtype.is_complex:
        parts = _exact(2 * count, op, seed).view(-1, 2)
        return torch.view_as_complex(parts.to(torch.float16)).to(dtype)
    return _exact(count, op, seed).to(dtype)


@functools.cache
def _pool() -> torch.Tensor:
    """16 MiB of random bytes: a generator of its own for each small tensor would be half the cost of a case."""
    words = torch.empty(1 << 21, dtype=torch.int64)
    return words.random_(-(2**63), None, generator=torch.Generator().manual_seed(1)).view(torch.uint8)


def _bytes(count: int, seed: int) -> torch.Tensor:
    """The pool's bytes from a place of the seed's own."""
    pool = _pool()
    start = seed * 7_368_787 % (len(pool) - count)
    return pool[start : start + count]


def _exact(count: int, op: str, seed: int) -> torch.Tensor:
    random = _bytes(count, seed)
    if op == "PRODUCT":  # magnitudes that neither round nor overflow, even in float16, when 8 of them are multiplied
        return MAGNITUDES[random.long() % 4]
    values = (random % 33).float().sub_(16).div_(4)
    if op in ("MIN", "MAX"):
        rare = _bytes(count, seed + 1000)
        values[rare < 13] = torch.nan
        values[rare > 248] = torch.inf
    return values


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Say whether two tensors hold the same shape, dtype and bits (NaN equals NaN, 0.0 differs from -0.0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(as_bytes(a), as_bytes(b))


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of the tensor as bytes of shape (*x.shape, itemsize)."""
    return torch.empty((*x.shape, 1), dtype=x.dtype).copy_(x.unsqueeze(-1)).view(torch.uint8)

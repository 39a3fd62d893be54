"""The header of a call, as bytes: what every rank lays beside its data. Never imports torch.

A header is a signature of 96 bytes (operation, dtype, reduce op, root, element count, shape and a digest of everything
else that must agree), then two numbers per rank of the group for calls that move pieces of different sizes: what the
caller sends to and expects from each rank. call.py makes headers, the guard compares them, `unisono ps` reads them.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "DTYPES",
    "OPERATIONS",
    "REDUCE_OPS",
    "SIGNATURE",
    "Header",
    "piece",
    "piece_numel",
    "read_header",
    "words_of_call",
]

OPERATIONS = (
    "barrier", "broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter", "reduce_scatter", "all_to_all",
    "send", "recv",
)  # fmt: skip
"""Every operation; its place is its code in a signature."""

REDUCE_OPS = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")

DTYPES = {
    "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint16": 2, "uint32": 4, "uint64": 8, "float16": 2,
    "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Bytes per element of every dtype, by torch's name; its place, from 1, is its code in a signature."""

SIGNATURE = struct.Struct("<BBBBiQQQ8q")
"""Operation, dtype and reduce op as codes; whether it is refused; root; element count; digests; the first 8 dims."""

_NUMEL_BITS = 44
_NAMES = ("", *DTYPES)


def piece(shape: Sequence[int]) -> int:
    """One number for a piece of data: its element count, and a check sum of its shape above it."""
    numel = 1
    for dim in shape:
        numel *= dim
    return (zlib.crc32(repr(tuple(shape)).encode()) & 0x7FFFF) << _NUMEL_BITS | numel


def piece_numel(number: int) -> int:
    """The element count in a `piece`."""
    return number & (1 << _NUMEL_BITS) - 1


def words_of_call(op: str, data: str, reduce_op: str, root: int | None, by: str = "") -> str:
    """A call as a person would write it: ``all_reduce(float32 [2, 3], SUM)``; no root is None or negative."""
    arguments = [data, reduce_op, f"root {root}" if root is not None and root >= 0 else "", f"by {by}" if by else ""]
    return f"{op}({', '.join(a for a in arguments if a)})"


@dataclass(frozen=True)
class Header:
    """A call as read from its header. ``sends``, ``expects``: elements per rank, where these may differ.

    ``refused``: the caller's arguments were, on its rank.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    reduce_op: str
    root: int
    numel: int
    sends: tuple[int, ...] = ()
    expects: tuple[int, ...] = ()
    refused: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the rank's tensor; where it sends pieces, of what it sends, else of what it expects."""
        return (self.numel or sum(self.sends) or sum(self.expects)) * DTYPES.get(self.dtype, 0)

    def describe(self, global_ranks: Sequence[int] | None = None) -> str:
        """In words; ``global_ranks``: of the group, for the root."""
        pieces = self.sends if any(self.sends) else self.expects
        if any(pieces) and not self.shape:
            data = f"{self.dtype}, {sum(pieces)} elements"
        else:
            data = f"{self.dtype} {list(self.shape)}" if self.dtype else ""
        root = global_ranks[self.root] if global_ranks and 0 <= self.root < len(global_ranks) else self.root
        return words_of_call(self.op, data, self.reduce_op, root)


def read_header(data: bytes) -> Header | None:
    """The header that ``data`` starts with; None if nothing was written there."""
    code, dtype, reduce_op, refused, root, numel, _, _, *dims = SIGNATURE.unpack_from(data)
    if not any(data[: SIGNATURE.size]) or code >= len(OPERATIONS) or dtype >= len(_NAMES):
        return None
    count = (len(data) - SIGNATURE.size) // 16
    numbers = [piece_numel(n) for n in struct.unpack_from(f"<{2 * count}Q", data, SIGNATURE.size)]
    moves = any(numbers)
    return Header(
        OPERATIONS[code],
        _NAMES[dtype],
        tuple(d for d in dims if d >= 0),
        REDUCE_OPS[reduce_op] if reduce_op < len(REDUCE_OPS) else "",
        root,
        numel,
        tuple(numbers[:count]) if moves else (),
        tuple(numbers[count:]) if moves else (),
        bool(refused),
    )

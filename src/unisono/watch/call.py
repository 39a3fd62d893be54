"""A call as data: what one rank asks for, in the bytes that its peers compare and in the words that people read.

The header of a call is a signature of 96 bytes (operation, dtype, reduce op, root, element count, shape and a digest of
everything else that must agree) and, for calls that move pieces of different sizes, what this rank sends to and expects
from each peer. Headers are made once per kind of call and cached with it.
"""

import hashlib
import os
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import FrameType

import torch

__all__ = [
    "OPERATIONS",
    "SIGNATURE",
    "Call",
    "Site",
    "call_site",
    "describe_header",
    "is_inner",
    "name_of_dtype",
    "piece",
    "piece_numel",
    "site_text",
]

OPERATIONS = (
    "barrier", "broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter", "reduce_scatter", "all_to_all",
    "send", "recv",
)  # fmt: skip
"""Every operation; its place is its code in a signature."""

REDUCE_OPS = ("", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")

SIGNATURE = struct.Struct("<BBBBiQQQ8q")
"""Operation, dtype and reduce op as codes; whether it is refused; root; element count; digests; the first 8 dims."""

_DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
    torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]  # fmt: skip
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES, 1)}
_NUMEL_BITS = 44


def name_of_dtype(dtype: torch.dtype | None) -> str:
    """``float32`` for ``torch.float32``; nothing for calls without data."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def piece(shape: Sequence[int]) -> int:
    """One number for a piece of data: its element count, and a check sum of its shape above it."""
    numel = 1
    for dim in shape:
        numel *= dim
    return (zlib.crc32(repr(tuple(shape)).encode()) & 0x7FFFF) << _NUMEL_BITS | numel


def piece_numel(number: int) -> int:
    """The element count in a `piece`."""
    return number & (1 << _NUMEL_BITS) - 1


@dataclass(eq=False)
class Call:
    """One rank's side of a collective.

    ``sends`` and ``expects`` hold a `piece` per rank of the group for operations whose sizes may differ by rank
    (gather, scatter, all_gather, all_to_all). ``rest`` is any other text that must agree.
    ``refused`` is the caller's mistake: such a call still meets its peers, so that they hear of it.
    """

    op: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    reduce_op: str = ""
    root: int = -1
    sends: tuple[int, ...] = ()
    expects: tuple[int, ...] = ()
    rest: str = ""
    refused: str = ""
    by: str = ""  # the algorithm, if one was chosen
    words: str = ""  # how the arguments read, where dtype and shape do not say it
    accepted: dict[bytes, int] = field(default_factory=dict, repr=False)
    """Headers of all ranks that were found to agree before, with the longest piece that goes between two ranks."""
    longest: int = 0
    """Elements of the longest piece any rank sends to another; known once the headers have been compared."""

    @property
    def numel(self) -> int:
        """Elements in ``shape``."""
        return piece_numel(piece(self.shape))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of this rank's tensor."""
        return self.numel * (self.dtype.itemsize if self.dtype else 0)

    @cached_property
    def signature(self) -> bytes:
        """The 96 bytes that must be equal on all ranks."""
        shape = () if self.sends else self.shape
        dims = (*shape, *(-1,) * 8)[:8]
        return SIGNATURE.pack(
            OPERATIONS.index(self.op),
            _DTYPE_CODES.get(self.dtype, 0) if self.dtype else 0,
            REDUCE_OPS.index(self.reduce_op),
            bool(self.refused),
            self.root,
            0 if self.sends else self.numel,
            _digest(self.rest + self.by + (repr(shape) if len(shape) > 8 else "")),
            _digest(self.refused) if self.refused else 0,
            *dims,
        )

    def header(self, size: int, nbytes: int) -> bytes:
        """Signature and pieces, filled up to the ``nbytes`` that a header of a group of ``size`` ranks takes."""
        none = (0,) * size
        pieces = struct.pack(f"<{2 * size}Q", *(self.sends or none), *(self.expects or none))
        return (self.signature + pieces).ljust(nbytes, b"\0")

    def describe(self, names: Sequence[int] | None = None) -> str:
        """As a person would write it: ``all_reduce(float32 [2, 3], SUM)``; ``names`` gives global ranks."""
        arguments = [self.words or (f"{name_of_dtype(self.dtype)} {list(self.shape)}" if self.dtype else "")]
        if self.reduce_op:
            arguments.append(self.reduce_op)
        if self.root >= 0:
            arguments.append(f"root {names[self.root] if names else self.root}")
        if self.by:
            arguments.append(f"by {self.by}")
        text = f"{self.op}({', '.join(a for a in arguments if a)})"
        return f"{text} refused: {self.refused}" if self.refused else text


Site = tuple[str, int, str]
"""Where a call came from: file, line, function."""

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INNER = (
    _HERE,
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    "<frozen",
    "<string>",
    _LIBRARY + "contextlib.py",
    _LIBRARY + "threading.py",
)


def is_inner(file: str) -> bool:
    """Whether a file's code is torch's, unisono's or glue of the standard library: nobody's call site."""
    return file.startswith(_INNER)


def call_site() -> Site:
    """The nearest frame that is not `is_inner`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_INNER):
            return code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return "", 0, ""


def site_text(site: Site) -> str:
    """``file:line in function``, the file relative to the working directory if it lies below it."""
    file, line, function = site
    if not file:
        return "no user code on the stack"
    short = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
    return f"{short}:{line} in {function}"


def describe_header(header: bytes) -> str:
    """A peer's call as far as its header tells: operation, dtype, shape, reduce op."""
    code, dtype, reduce_op, _, _, _, _, _, *dims = SIGNATURE.unpack_from(header)
    if not any(header[: SIGNATURE.size]):
        return ""
    shape = tuple(d for d in dims if d >= 0)
    return Call(OPERATIONS[code], _DTYPES[dtype - 1] if dtype else None, shape, REDUCE_OPS[reduce_op]).describe()

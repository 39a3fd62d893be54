"""A call as data: the arguments of one rank, as bytes that its peers compare and as words for people.

A call's header (header.py) is made once per kind of call and cached with it.
"""

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from unisono.errors import UsageError
from unisono.runtime.call_site import Site, call_site, site_text
from unisono.runtime.header import DTYPES, OPERATIONS, REDUCE_OPS, SIGNATURE, piece, piece_numel, words_of_call

__all__ = ["SIGNATURE", "Call", "Site", "call_site", "name_of_dtype", "piece", "piece_numel", "site_text"]

_DTYPE_CODES = {getattr(torch, name): code for code, name in enumerate(DTYPES, 1)}


def name_of_dtype(dtype: torch.dtype | None) -> str:
    """``float32`` for ``torch.float32``; nothing for calls without data."""
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(eq=False)
class Call:
    """One rank's side of a collective.

    ``sends`` and ``expects`` hold a `piece` per rank of the group for operations whose sizes may differ by rank
    (gather, scatter, all_gather, all_to_all). ``extra_signature`` is any other text that must agree.
    ``refused`` is the caller's mistake: such a call still meets its peers, so that they raise too.
    """

    op: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    reduce_op: str = ""
    root: int = -1
    sends: tuple[int, ...] = ()
    expects: tuple[int, ...] = ()
    extra_signature: str = ""
    refused: str = ""
    algorithm: str = ""  # the algorithm, if one was chosen
    args_text: str = ""  # how the arguments read, where dtype and shape do not say it
    parts: tuple[int, ...] = ()
    """Elements of each, if these are several tensors."""
    accepted: set[bytes] = field(default_factory=set, repr=False)
    """Headers of all ranks that were found to agree before."""

    @cached_property
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
        code = _DTYPE_CODES.get(self.dtype, 0) if self.dtype else 0
        unknown = "" if code else name_of_dtype(self.dtype)
        return SIGNATURE.pack(
            OPERATIONS.index(self.op),
            code,
            REDUCE_OPS.index(self.reduce_op),
            bool(self.refused),
            self.root,
            0 if self.sends else self.numel,
            _digest(self.extra_signature + self.algorithm + unknown + (repr(shape) if len(shape) > 8 else "")),
            _digest(self.refused) if self.refused else 0,
            *dims,
        )

    @cached_property
    def checksum(self) -> int:
        """Of the signature, 32 bits."""
        return zlib.crc32(self.signature)

    def header(self, size: int, nbytes: int) -> bytes:
        """Signature and pieces, filled up to the ``nbytes`` that a header of a group of ``size`` ranks takes."""
        none = (0,) * size
        pieces = struct.pack(f"<{2 * size}Q", *(self.sends or none), *(self.expects or none))
        return (self.signature + pieces).ljust(nbytes, b"\0")

    def mistake(self, rank: int) -> UsageError:
        """The error of the caller, global rank ``rank``, of a call that is ``refused``."""
        op = "" if self.refused.startswith(self.op) else f"{self.op} on "
        return UsageError(f"{op}rank {rank}: {self.refused}")

    def describe(self, global_ranks: Sequence[int] | None = None) -> str:
        """The call in words: ``all_reduce(float32 [2, 3], SUM)``; ``global_ranks``: of the group, for the root."""
        data = self.args_text or (f"{name_of_dtype(self.dtype)} {list(self.shape)}" if self.dtype else "")
        root = global_ranks[self.root] if global_ranks and self.root >= 0 else self.root
        text = words_of_call(self.op, data, self.reduce_op, root, self.algorithm)
        return f"{text} refused: {self.refused}" if self.refused else text

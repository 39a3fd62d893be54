"""Prefetch of thousands of tensors before a walk over them, which else waits for the memory of one after the other.

A tensor is a Python object and, elsewhere, what torch keeps of it: sizes, strides, its storage. In a process whose
memory was used before these lie scattered, and have left the caches by the next update.
"""

from collections.abc import Collection

import numpy as np
from torch import Tensor

from unisono.runtime.loops import CHECKSUM, loops, wanted
from unisono.weights.rows import address_of

__all__ = ["Prefetch"]

_MANY = 64
_OBJECT, _CONTENT = 2, 4  # lines of 64 bytes


class Prefetch:
    """That of some tensors. One that was freed meanwhile does no harm: a prefetch is no access."""

    def __init__(self, tensors: Collection[Tensor] = ()) -> None:
        some = tensors if len(tensors) >= _MANY else ()
        self._objects = np.array([id(tensor) for tensor in some], dtype=np.int64)
        self._contents = np.array([tensor._cdata for tensor in some], dtype=np.int64)

    def begin(self) -> None:
        """Asks for their memory, and returns before it has come; does nothing without the compiled loop."""
        if len(self._objects) and wanted() and loops.kept(CHECKSUM):
            ask = loops.of(CHECKSUM)["prefetch"]
            ask(address_of(self._objects), len(self._objects), _OBJECT)
            ask(address_of(self._contents), len(self._contents), _CONTENT)

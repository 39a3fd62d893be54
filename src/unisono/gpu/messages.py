"""The kernels of messages of one rank, all of them loaded before any of them waits; and their launch."""

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from unisono.gpu.compile import Kernel, compiled, message_launcher
from unisono.gpu.defaults import MESSAGE_TILES, message_rows, message_shape
from unisono.gpu.kernels import KernelCalls
from unisono.gpu.message_text import MESSAGE_MODULE, SIDE, SIDES, kernel_of_messages
from unisono.runtime.call import name_of_dtype

__all__ = ["MessageKernels", "Side", "header_of"]

_WORD = 8  # bytes
_FACTS = struct.Struct("<Qqq")


@lru_cache(maxsize=4096)
def header_of(dtype: torch.dtype, numel: int, tag: int) -> int:
    """What a message's flags carry, 32 bits with a sign: sender and receiver must agree on dtype, elements and tag."""
    found = zlib.crc32(_FACTS.pack(zlib.crc32(name_of_dtype(dtype).encode()), numel, tag))
    return found - (1 << 32) if found >= 1 << 31 else found


@dataclass(frozen=True, slots=True)
class Side:
    """What a launch sends, or receives: its address, a multiple of 16, bytes, `header_of` it, the group rank of the
    peer.
    """

    address: int
    nbytes: int
    header: int
    peer: int


@lru_cache(maxsize=16)
def _loaded(sides: int, tile: int, warps: int) -> Callable[[int, int, Sequence[int]], None]:
    """The kernel of so many sides and a tile's bytes, the same for all groups of the process."""
    return message_launcher(compiled(Kernel(kernel_of_messages(sides), MESSAGE_MODULE, "int64", tile // _WORD, warps)))


class MessageKernels:
    """The kernels of messages beside a rank's ``kernels``, whose workspace they share."""

    def __init__(self, kernels: KernelCalls) -> None:
        self._launches = {(s, tile): _loaded(s, tile, warps) for s in SIDES for tile, warps in MESSAGE_TILES}
        self._rows = message_rows(kernels.size, kernels.multiprocessors)
        space = kernels.workspace
        self._fixed = (space.bases, space.counters, space.record, kernels.rank, kernels.size, kernels.limit)

    def fit(self, sends: Sequence[int], receives: Sequence[int]) -> bool:
        """True if messages of so many bytes are one launch."""
        tiles = {message_shape(nbytes, self._rows)[0] for nbytes in (*sends, *receives)}
        return len(tiles) == 1 and max(len(sends), len(receives)) <= SIDES[-1]

    def launch(self, stream: int, sends: Sequence[Side], receives: Sequence[Side]) -> None:
        """Launches messages that `fit`, at least one, on a raw stream. Messages of one peer and direction share blocks,
        which move them in the order given.
        """
        sides = next(s for s in SIDES if s >= max(len(sends), len(receives)))
        arguments: list[int] = []
        end, tile = 0, 0
        for given in (sends, receives):
            first: dict[int, int] = {}
            for side in given:
                if side.peer not in first:
                    first[side.peer] = end
                    end += max(message_shape(s.nbytes, self._rows)[2] for s in given if s.peer == side.peer)
                tile, _, blocks = message_shape(side.nbytes, self._rows)
                arguments += [side.address, side.nbytes, side.header, side.peer, first[side.peer], blocks]
            arguments += [0] * ((1 + len(SIDE)) * (sides - len(given)))
        self._launches[sides, tile](end, stream, (*arguments, *self._fixed))

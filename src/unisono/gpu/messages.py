"""The kernels of messages of one rank, all of them loaded before any of them waits; and their launch."""

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from unisono.gpu.compile import Kernel, compiled, message_launcher
from unisono.gpu.defaults import LAUNCHES, message_rows, message_shape
from unisono.gpu.message_text import KERNEL, MESSAGE_MODULE
from unisono.gpu.workspace import Workspace

__all__ = ["MessageKernels", "Side", "header_of"]

_WORD = 8  # bytes
_FACTS = struct.Struct("<Qqq")


def header_of(dtype: str, numel: int, tag: int) -> int:
    """What a message's flags carry, 32 bits with a sign: sender and receiver must agree on dtype, elements and tag."""
    found = zlib.crc32(_FACTS.pack(zlib.crc32(dtype.encode()), numel, tag))
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
def _loaded(tile: int, warps: int) -> Callable[[int, int, Sequence[int]], None]:
    """The kernel of a tile's bytes, the same for all groups of the process."""
    return message_launcher(compiled(Kernel(KERNEL, MESSAGE_MODULE, "int64", tile // _WORD, warps)))


class MessageKernels:
    """``multiprocessors``: the least of all ranks' GPUs; ``limit``: seconds that kernels wait."""

    def __init__(self, workspace: Workspace, rank: int, world_size: int, multiprocessors: int, limit: float) -> None:
        self._launches = {tile: _loaded(tile, warps) for _, tile, warps in LAUNCHES}
        self._rows = message_rows(world_size, min(multiprocessors, workspace.multiprocessors))
        space = workspace
        self._fixed = (space.bases, space.counters, space.record, rank, world_size, int(min(limit, 1e9) * 1e9))

    def alike(self, sent: int, received: int) -> bool:
        """True if messages of so many bytes fit one launch."""
        return message_shape(sent, self._rows)[0] == message_shape(received, self._rows)[0]

    def launch(self, stream: int, sent: Side | None, received: Side | None) -> None:
        """Launches a send, a receive, or both at once if they are `alike`, on a raw stream."""
        blocks, arguments, launch = 0, [], None
        for side in (sent, received):
            if side is None:
                arguments += [0, 0, 0, 0, 0]
                continue
            tile, _, mine = message_shape(side.nbytes, self._rows)
            launch, blocks = self._launches[tile], blocks + mine
            arguments += [side.address, side.nbytes, side.header, side.peer, mine]
        assert launch is not None
        launch(blocks, stream, (*arguments, *self._fixed))

"""The kernels of messages of one rank, all of them loaded before any of them waits; and their launch."""

import logging
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from unisono.errors import first_line
from unisono.gpu.compile import Kernel, compiled
from unisono.gpu.defaults import MESSAGE_TILES, message_rows, message_shape
from unisono.gpu.kernels import KernelCalls
from unisono.gpu.launching import load, message_launcher
from unisono.gpu.message_text import MESSAGE_MODULE, SIDE, SIDES, kernel_of_messages
from unisono.runtime.call import name_of_dtype

__all__ = ["MessageKernels", "Side", "header_of", "load_message_kernels"]

_WORD = 8  # bytes
_FACTS = struct.Struct("<Qqq")
_KEPT = 4096


@lru_cache(maxsize=4096)
def header_of(dtype: torch.dtype, numel: int, tag: int) -> int:
    """What a message's flags carry, 32 bits with a sign: sender and receiver must agree on dtype, elements and tag."""
    found = zlib.crc32(_FACTS.pack(zlib.crc32(name_of_dtype(dtype).encode()), numel, tag))
    return found - (1 << 32) if found >= 1 << 31 else found


class Side(NamedTuple):
    """What a launch sends, or receives: its address, a multiple of 16, bytes, `header_of` it, the group rank of the
    peer.
    """

    address: int
    nbytes: int
    header: int
    peer: int


@lru_cache(maxsize=64)
def _loaded(device: int, sides: int, tile: int, warps: int) -> Any:
    """The kernel of so many sides and a tile's bytes, of all groups of the process on a GPU, the current one."""
    return load(compiled(Kernel(kernel_of_messages(sides), MESSAGE_MODULE, "int64", tile // _WORD, warps)))


def _all_loaded(device: int) -> dict[tuple[int, int], Any]:
    """All of them, by sides and tile."""
    return {(sides, tile): _loaded(device, sides, tile, warps) for sides in SIDES for tile, warps in MESSAGE_TILES}


def load_message_kernels(device: int) -> str:
    """Compiles and loads all kernels of messages; returns why that failed, nothing if it did not.

    ``device``: index of the current GPU.
    """
    try:
        _all_loaded(device)
    except Exception as error:  # of any kind: the peers must learn of it
        words = "Kernels can not be compiled here: all calls on GPUs go by NCCL"
        logging.getLogger("unisono").warning(words, exc_info=True)
        return f"a rank can not compile kernels: {first_line(error)}"
    return ""


class _Shape(NamedTuple):
    """How messages of some sizes and peers are launched: the kernel, its blocks, by message the first one and how many
    move it, and what the arguments of a kernel of more sends, or receives, are filled up with.
    """

    launch: Callable[[int, int, Sequence[int]], None]
    blocks: int
    parts: list[tuple[int, int]]
    fill: tuple[list[int], list[int]]


class MessageKernels:
    """The kernels of messages beside a rank's ``kernels``, whose workspace they share."""

    def __init__(self, kernels: KernelCalls) -> None:
        loaded = _all_loaded(kernels.workspace.device.index)
        self._launches = {key: message_launcher(kernel) for key, kernel in loaded.items()}
        self._rows = message_rows(kernels.size, kernels.multiprocessors)
        space = kernels.workspace
        self._fixed = (space.bases, space.counters, space.record, kernels.rank, kernels.size, kernels.limit)
        self._shapes: dict[tuple[int, ...], _Shape] = {}

    def fit(self, sends: Sequence[int], receives: Sequence[int]) -> bool:
        """True if messages of so many bytes are one launch."""
        tiles = {message_shape(nbytes, self._rows)[0] for nbytes in (*sends, *receives)}
        return len(tiles) == 1 and max(len(sends), len(receives)) <= SIDES[-1]

    def launch(self, stream: int, sends: Sequence[Side], receives: Sequence[Side]) -> None:
        """Launches messages that `fit`, at least one, on a raw stream. Messages of one peer and direction share blocks,
        which move them in the order given.
        """
        key = (len(sends), *[number for side in (*sends, *receives) for number in side[1:4:2]])
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= _KEPT:
                self._shapes.clear()
            shape = self._shapes[key] = self._shape(sends, receives)
        arguments: list[int] = []
        parts = iter(shape.parts)
        for given, fill in zip((sends, receives), shape.fill, strict=True):
            for side in given:
                arguments += side
                arguments += next(parts)
            arguments += fill
        shape.launch(shape.blocks, stream, (*arguments, *self._fixed))

    def _shape(self, sends: Sequence[Side], receives: Sequence[Side]) -> _Shape:
        sides = next(s for s in SIDES if s >= max(len(sends), len(receives)))
        parts: list[tuple[int, int]] = []
        end, tile = 0, 0
        for given in (sends, receives):
            first: dict[int, int] = {}
            for side in given:
                if side.peer not in first:
                    first[side.peer] = end
                    end += max(message_shape(s.nbytes, self._rows)[2] for s in given if s.peer == side.peer)
                tile, _, blocks = message_shape(side.nbytes, self._rows)
                parts.append((first[side.peer], blocks))
        missing = [[0] * ((1 + len(SIDE)) * (sides - len(given))) for given in (sends, receives)]
        return _Shape(self._launches[sides, tile], end, parts, (missing[0], missing[1]))

"""Messages of one rank: as they were asked for, and as they arrive; the head that goes before their bytes."""

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from unisono.runtime.task import Task
from unisono.transport.base import as_bytes
from unisono.transport.inference import outside_inference, plain
from unisono.transport.ring import UNIT, Ring
from unisono.watch.call import Call, name_of_dtype
from unisono.watch.flight import Note

__all__ = ["Arriving", "Inbox", "Letter", "Message", "head", "letter", "padded", "read_head"]

_HEAD = struct.Struct("<qQQ16s")  # tag, payload bytes, elements, dtype by name


@cache
def _dtype_bytes(dtype: torch.dtype | None) -> bytes:
    return name_of_dtype(dtype).encode()


def head(call: Call, tag: int, nbytes: int) -> bytes:
    """The head of a message of ``nbytes``: one unit of a ring."""
    return _HEAD.pack(tag, nbytes, call.numel, _dtype_bytes(call.dtype)).ljust(UNIT, b"\0")


def read_head(data: bytes) -> tuple[int, int, int, str]:
    """Tag, payload bytes, elements and dtype of the message that begins with ``data``."""
    tag, nbytes, numel, dtype = _HEAD.unpack_from(data)
    return tag, nbytes, numel, dtype.rstrip(b"\0").decode()


def padded(nbytes: int) -> int:
    """The bytes of a ring that a payload takes."""
    return -(-nbytes // UNIT) * UNIT


@dataclass(frozen=True, slots=True)
class Letter:
    """A kind of message, prepared for the loops: its call, tag and size, and the address of its head."""

    call: Call
    tag: int
    nbytes: int
    head: int
    kept: Any  # the memory behind the address


def letter(call: Call, tag: int, nbytes: int) -> Letter:
    """The letter of a message of ``nbytes``."""
    data = np.frombuffer(head(call, tag, nbytes), np.uint8)
    return Letter(call, tag, nbytes, int(data.ctypes.data), data)


class Message(Task):
    """A send (to ``peer``) or a receive (from ``peer``, or from any rank if None) of one flat uint8 tensor.

    ``after`` runs once a received message lies in ``data``: it brings it to a tensor that is not contiguous.
    ``letter``: how the loops know it. Made with one instead of ``data``, it is a message of ``outputs[0]`` as it lies
    in memory.
    """

    __slots__ = ("_data", "after", "letter", "moved", "note", "number", "peer", "source", "started", "tag", "wanted")

    note: Note

    def __init__(
        self,
        call: Call,
        data: torch.Tensor | Letter,
        peer: int | None,
        tag: int,
        outputs: list[torch.Tensor],
        timeout: float,
        after: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(call, outputs, timeout)
        self.letter: Letter | None = data if isinstance(data, Letter) else None
        self._data: torch.Tensor | None = None if isinstance(data, Letter) else data
        self.peer, self.tag, self.after = peer, tag, after
        self.moved, self.number, self.started, self.wanted = 0, 0, False, False
        self.source = -1 if peer is None else peer

    @property
    @outside_inference
    def data(self) -> torch.Tensor:
        """Its bytes, in a row; of a message with a letter not made before anybody asks."""
        if self._data is None:
            whole = plain(self.outputs[0])
            self._data = as_bytes(whole.as_strided((whole.numel(),), (1,)))
        return self._data

    def lettered(self) -> tuple[Letter, int]:
        """Its letter, and the address of its bytes."""
        if self.letter is None:
            self.letter = letter(self.call, self.tag, self.data.numel())
        return self.letter, (self.outputs[0] if self._data is None else self._data).data_ptr()


@dataclass
class Arriving:
    """The message at the reading end of a ring: whom it is for (None: nobody any more), what is left of it."""

    tag: int
    nbytes: int
    numel: int
    dtype: str
    number: int
    into: torch.Tensor | None
    message: Message | None
    moved: int = 0
    owed: int = UNIT  # bytes read (the head) that the writer has not been told of
    refused: bool = False  # taken without a receive, for its sender waits

    @property
    def taken(self) -> bool:
        """Whether anybody needs the rest of it to come."""
        return self.refused or self.message is not None


@dataclass
class Inbox:
    """What comes from one peer: the message at the reading end of its ring, and those that wait for their receive."""

    ring: Ring
    current: Arriving | None = None
    aside: deque[Arriving] = field(default_factory=deque)

    def unclaimed(self) -> list[Arriving]:
        """What was taken out of the ring because a receive with another tag waits behind it."""
        arriving = [self.current] if self.current and not self.current.taken and self.current.into is not None else []
        return [*self.aside, *arriving]

    def lying(self) -> list[Arriving]:
        """What is still in the ring, whole or in part."""
        found, here, there = [], 0, self.ring.there()
        if self.current is not None:
            here = self.current.owed + padded(self.current.nbytes - self.current.moved)
        while there - here >= UNIT:
            tag, nbytes, numel, dtype = read_head(self.ring.head(here))
            found.append(Arriving(tag, nbytes, numel, dtype, 0, None, None))
            here += UNIT + padded(nbytes)
        return found

    @property
    def occupied(self) -> bool:
        """Whether the next receive may have to do with what has come before."""
        return self.current is not None or bool(self.aside)

"""Messages of one rank: posted ones, arriving ones, and the head that precedes their bytes."""

import ctypes
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from unisono.errors import UnisonoError
from unisono.runtime.call import Call, name_of_dtype
from unisono.runtime.task import Task
from unisono.transport.ring import UNIT, Ring

__all__ = ["Arriving", "Inbox", "Message", "PreparedMessage", "prepare_message", "read_head"]

_HEAD = struct.Struct("<qQQ16s")  # tag, payload bytes, elements, dtype by name


@cache
def _dtype_bytes(dtype: torch.dtype | None) -> bytes:
    return name_of_dtype(dtype).encode()


def read_head(data: bytes) -> tuple[int, int, int, str]:
    """Tag, payload bytes, elements and dtype of the message that begins with ``data``."""
    tag, nbytes, numel, dtype = _HEAD.unpack_from(data)
    return tag, nbytes, numel, dtype.rstrip(b"\0").decode()


@dataclass(frozen=True, slots=True)
class PreparedMessage:
    """A kind of message: its call, tag and bytes, and the address of its head, which is one unit of a ring."""

    call: Call
    op: str
    sends: bool
    tag: int
    nbytes: int
    head: int
    kept: Any  # the memory behind the address


def prepare_message(call: Call, tag: int, nbytes: int) -> PreparedMessage:
    """A message of ``nbytes``, prepared for the loops."""
    head = _HEAD.pack(tag, nbytes, call.numel, _dtype_bytes(call.dtype)).ljust(UNIT, b"\0")
    data = np.frombuffer(head, np.uint8)
    return PreparedMessage(call, call.op, call.op == "send", tag, nbytes, int(data.ctypes.data), data)


class Message(Task):
    """A send (to ``peer``) or a receive (from ``peer``, or from any rank if None) of a contiguous tensor, ``memory``.

    ``after`` runs once a received message lies there: it brings it to a tensor that is not contiguous. ``call_id`` is
    what the monitor calls it.
    """

    __slots__ = ("after", "call_id", "memory", "moved", "number", "peer", "prepared", "source", "started", "wanted")

    call_id: Any

    def __init__(
        self,
        prepared: PreparedMessage,
        peer: int | None,
        memory: torch.Tensor,
        outputs: list[torch.Tensor],
        timeout: float,
        after: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(prepared.call, outputs, timeout)
        self.prepared, self.memory = prepared, memory
        self.peer, self.after = peer, after
        self.moved, self.number, self.started, self.wanted = 0, 0, False, False
        self.source = -1 if peer is None else peer

    @property
    def tag(self) -> int:
        """The tag of a send and its receive."""
        return self.prepared.tag

    @property
    def sends(self) -> bool:
        """True if it is a send."""
        return self.prepared.sends

    def address(self) -> int:
        """The address of its bytes. Raises `UnisonoError` if the tensor has lost its memory since the call."""
        memory, nbytes = self.memory, self.prepared.nbytes
        there = memory.untyped_storage().nbytes()
        if there < memory.storage_offset() * memory.itemsize + nbytes:
            raise UnisonoError(
                f"a message could not be copied: its tensor's storage has been resized to {there} bytes while the "
                f"{self.call.op} of {nbytes} bytes was under way; keep it until that is done"
            )
        return memory.data_ptr()


@dataclass
class Arriving:
    """The message at the reading end of a ring: its receive, or its bytes if ``unexpected``; else it is dropped."""

    tag: int
    nbytes: int
    numel: int
    dtype: str
    number: int = 0
    message: Message | None = None
    unexpected: Any = None  # its bytes, as a NumPy array
    moved: int = 0
    refused: bool = False  # taken without a receive, for its sender waits

    @property
    def taken(self) -> bool:
        """True if the rest of it is needed."""
        return self.refused or self.message is not None

    def withdraw(self, keep: bool) -> None:
        """Its receive has failed; with ``keep``, what came of it is kept for another, as of an unexpected message."""
        message, self.message = self.message, None
        if message is None or not keep:
            return
        with suppress(UnisonoError):  # the tensor has lost its memory: the message is dropped
            source, unexpected = message.address(), np.empty(self.nbytes, np.uint8)
            ctypes.memmove(unexpected.ctypes.data, source, self.moved)
            self.unexpected = unexpected


@dataclass
class Inbox:
    """Messages from one peer: the one at the reading end of its ring, and those that wait for their receive."""

    ring: Ring
    current: Arriving | None = None
    unexpected: deque[Arriving] = field(default_factory=deque)

    def unclaimed(self) -> list[Arriving]:
        """Messages taken out of the ring since a receive with another tag waits behind them."""
        return [
            *self.unexpected,
            *([self.current] if self.current is not None and self.current.unexpected is not None else []),
        ]

    def in_ring(self) -> list[Arriving]:
        """Messages still in the ring, whole or in part."""
        found, here, there = [], 0, self.ring.there()
        if self.current is not None:
            here = _padded(self.current.nbytes - self.current.moved)
        while there - here >= UNIT:
            tag, nbytes, numel, dtype = read_head(self.ring.head(here))
            found.append(Arriving(tag, nbytes, numel, dtype))
            here += UNIT + _padded(nbytes)
        return found

    @property
    def occupied(self) -> bool:
        """True if messages have arrived that the next receive may match."""
        return self.current is not None or bool(self.unexpected)


def _padded(nbytes: int) -> int:
    """The bytes of a ring that a payload takes."""
    return -(-nbytes // UNIT) * UNIT

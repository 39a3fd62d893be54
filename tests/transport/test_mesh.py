"""Channels over connections that end: what came before is delivered, then the end is reported."""

import struct
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from unisono.transport.mesh import Channel

FRAME = 64


class Arrived:
    """A receive whose message is there."""

    def wait(self, limit: timedelta) -> None:
        pass


class Closed:
    """A Gloo group whose peer has sent frames 0 to 7 and has closed the connection."""

    def __init__(self) -> None:
        self.frames = 0

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        if self.frames == 8:
            raise RuntimeError("closed by the peer")
        tensors[0].numpy().data[:9] = struct.pack("<IIB", 0, 1, self.frames)
        self.frames += 1
        return Arrived()


class OneMesh:
    """A mesh of one channel; notes what is lost."""

    def __init__(self) -> None:
        self.engine, self.words, self.over = Closed(), list[str](), threading.Event()
        self.sockets: dict[int, int] = {}

    def lost(self, peer: int, tag: int, words: str) -> None:
        self.words.append(words)
        self.over.set()


def test_frames_that_came_before_the_end_are_delivered() -> None:
    mesh, came = OneMesh(), list[int]()
    made: Any = mesh
    tested = Channel(made, 1, 1, FRAME, lambda peer, kind, body, receive: came.append(body[0]))
    tested.start()
    assert mesh.over.wait(5)
    tested.end()
    assert came == list(range(8))

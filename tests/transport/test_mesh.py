"""Channels over connections that end: what came before is delivered, then the end is reported, once data is there."""

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


class Refused:
    """A receive whose connection has ended; fails once it may."""

    def __init__(self, may: threading.Event) -> None:
        self.may = may

    def wait(self, limit: timedelta) -> None:
        self.may.wait(5)
        raise RuntimeError("closed by the peer")


class Closed:
    """A Gloo group whose peer has sent frames 0, 1, 2 and has closed the connection; data is still on its way."""

    def __init__(self) -> None:
        self.frames, self.may = 0, threading.Event()

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> Any:
        if tag % 2:
            return Refused(self.may)
        if self.frames == 3:
            raise RuntimeError("closed by the peer")
        tensors[0].numpy().data[:9] = struct.pack("<IIB", 0, 1, self.frames)
        self.frames += 1
        return Arrived()


class OneMesh:
    """A mesh of one channel; notes what is lost."""

    def __init__(self) -> None:
        self.frame_nbytes, self.gloo, self.words, self.over = FRAME, Closed(), list[str](), threading.Event()

    def lost(self, peer: int, tag: int, words: str) -> None:
        self.words.append(words)
        self.over.set()


def channel() -> tuple[Channel, OneMesh, list[int]]:
    mesh, came = OneMesh(), list[int]()
    made: Any = mesh
    return Channel(made, 1, 1, lambda peer, kind, body, receive: came.append(body[0])), mesh, came


def test_frames_that_came_before_the_end_are_delivered() -> None:
    tested, mesh, came = channel()
    tested.start()
    assert mesh.over.wait(5)
    tested.end()
    assert came == [0, 1, 2]
    assert tested.drained


def test_data_that_is_expected_ends_before_what_waits_for_it() -> None:
    tested, mesh, _ = channel()
    done, seen = threading.Event(), list[str]()
    tested.expect_data([torch.empty(4, dtype=torch.uint8)], lambda: seen.append("data"))
    tested.after_data(lambda: (seen.append("after"), done.set()))  # type: ignore[func-returns-value]
    assert seen == []
    mesh.gloo.may.set()
    assert done.wait(5)
    tested.end()
    assert (seen, mesh.words) == (["after"], ["closed by the peer"])

"""A frame leaves in one packet: Gloo's announcement, the data, and word of the receives that are posted behind it."""

import socket
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ranks import ranks
from transport.test_handshake import connected
from unisono.transport.cork import cork
from unisono.transport.mesh import Mesh, Receive

ROUNDS = 60
_INFO, _SEGMENTS = 192, 156  # of Linux's struct tcp_info: bytes, where the segments with data begin that were sent


def segments_sent(fds: Iterable[int]) -> int:
    found = 0
    for fd in fds:
        with closing(socket.socket(fileno=socket.dup(fd))) as copy:
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO)
        found += struct.unpack_from("<I", info, _SEGMENTS)[0]
    return found


def ping_pong(rank: int, world_size: int, meeting: str) -> tuple[int, list[int], list[int]]:
    """Frames there and back: the segments that this rank has sent, what it has received, the peers of its sockets."""
    found = connected(rank, world_size, meeting, "a nonce")
    mesh, peer = Mesh(found, lambda *_: None), 1 - rank
    came, over = list[int](), threading.Event()

    def answer(peer: int, kind: int, body: memoryview, receive: Receive) -> None:
        came.append(body[0])
        if came[-1] < ROUNDS:
            channel.send(0, [bytes([came[-1] + 1])])
        if came[-1] >= ROUNDS - 1:
            over.set()

    channel = mesh.channel(peer, 1, 64, answer)
    mesh.start()
    dist.barrier()
    before = segments_sent(found.sockets.values())
    if rank == 0:
        channel.send(0, [b"\0"])
    assert over.wait(20)
    dist.barrier()
    sent = segments_sent(found.sockets.values()) - before
    dist.barrier()  # the end of one closes the sockets of both
    mesh.close(time.monotonic() + 5.0, False, [])
    return sent, came, list(found.sockets)


def test_a_frame_is_one_packet(tmp_path: Path) -> None:
    (first, even, peers), (second, odd, others) = ranks(2).run(ping_pong, str(tmp_path / "meeting"))
    assert (odd, even) == (list(range(0, ROUNDS + 1, 2)), list(range(1, ROUNDS, 2)))
    assert (peers, others) == ([1], [0])
    for sent in (first, second):
        assert sent <= ROUNDS // 2 + 3, "three packets a frame, without"


def test_what_is_corked_waits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            other.settimeout(0.05)
            cork(one.fileno(), True)
            one.send(b"a")
            received: Any = b""
            with suppress(TimeoutError):
                received = other.recv(8)
            one.send(b"b")
            cork(one.fileno(), False)
            other.settimeout(5.0)
            assert (received, other.recv(8)) == (b"", b"ab")

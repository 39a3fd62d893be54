"""Limits on sockets that others have made, and their end."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from unisono.transport.keepalive import keep_alive, shut_down, sockets

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def connect() -> Iterator["Connect"]:
    with Connect() as made:
        yield made


class Connect(ExitStack):
    """Makes connections of this host, both ends in this process, that are gone after the test."""

    def __call__(self) -> Ends:
        with socket.create_server(("127.0.0.1", 0)) as door:
            near = self.enter_context(socket.create_connection(door.getsockname()))
            return near, self.enter_context(door.accept()[0])


def test_connections_have_limits(connect: Connect) -> None:
    before = sockets()
    near, far = connect()
    made = sockets() - before
    assert {each.fd for each in made} == {near.fileno(), far.fileno()}
    assert {each.fd for each in sockets(near.getpeername()[1])} == {near.fileno()}
    keep_alive(made, 15.0)
    for each in (near, far):
        assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 15000


def test_connections_end_with_what_was_sent(connect: Connect) -> None:
    before = sockets()
    near, far = connect()
    near.sendall(b"last")
    shut_down(each for each in sockets() - before if each.fd == near.fileno())
    assert far.recv(10) + far.recv(10) == b"last"


def test_a_later_connection_of_one_descriptor_is_left_alone(connect: Connect) -> None:
    """As where a group's connection was lost, and the next group has its descriptor when the first one is left."""
    before = sockets()
    near, far = connect()
    made = sockets() - before
    descriptors = {near.fileno(), far.fileno()}
    near.close()
    far.close()
    near, far = connect()
    assert descriptors & {near.fileno(), far.fileno()}
    shut_down(made)
    near.sendall(b"alive")
    assert far.recv(10) == b"alive"

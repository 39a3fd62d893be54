"""Hosts' values meet, in time or not at all; what else comes to the port changes nothing."""

import json
import socket
import threading
import time
from typing import Any

import pytest

from ports import free_port
from unisono.errors import UsageError
from unisono.topo.exchange import Exchange, Values, listen, why
from unisono.topo.links import link_server, measure_link


def post(port: int, line: bytes) -> bytes:
    """What the server answers to a line of another host."""
    with socket.create_connection(("127.0.0.1", port), 5) as channel:
        channel.sendall(line)
        with channel.makefile("rb") as file:
            return file.readline()


def value(key: str, number: int) -> bytes:
    return json.dumps({"step": "facts", "key": key, "value": number}).encode() + b"\n"


def both(step: str, values: Values) -> bool:
    return len(values) >= 2


def test_all_get_what_all_have_posted() -> None:
    answers: list[Any] = []
    with Exchange("a", port := free_port(), [], both, 10.0) as exchange:
        other = threading.Thread(target=lambda: answers.append(json.loads(post(port, value("b", 2)))))
        other.start()
        assert exchange.gather("facts", 1) == {"a": 1, "b": 2}
        other.join()
    assert answers == [{"values": {"a": 1, "b": 2}}]


def test_garbage_is_dropped_and_half_open_connections_wait_for_nobody() -> None:
    begun = time.monotonic()
    with Exchange("a", port := free_port(), [], both, 10.0) as exchange:
        assert post(port, b"GET / HTTP/1.1\r\n") == b""
        assert post(port, b"[1, 2]\n") == post(port, b'{"step": "facts"}\n') == post(port, b"\x80\x04\x95\n") == b""
        half = socket.create_connection(("127.0.0.1", port), 5)
        threading.Thread(target=post, args=(port, value("b", 2))).start()
        assert exchange.gather("facts", 1) == {"a": 1, "b": 2}
        half.close()
    assert time.monotonic() - begun < 5.0


def test_hosts_that_do_not_come_are_not_waited_for() -> None:
    begun = time.monotonic()
    with Exchange("a", free_port(), [], both, 0.3) as exchange:
        assert exchange.gather("facts", 1) == {"a": 1}
    assert 0.3 <= time.monotonic() - begun < 3.0


def test_a_server_that_is_not_there_is_named_with_the_reason() -> None:
    with Exchange("a", free_port(), ["localhost.invalid"], both, 0.3) as exchange:
        assert exchange.gather("facts", 1) == {"a": 1}
        assert exchange.failures == {"localhost.invalid": "name does not resolve"}


def test_a_port_that_is_taken() -> None:
    with listen() as door:
        port = door.getsockname()[1]
        with pytest.raises(UsageError, match=rf"^port {port} of .* can not be listened on \(address already in use\)"):
            Exchange("a", port, [], both, 1.0)


def test_nothing_listens_afterwards() -> None:
    with Exchange("a", port := free_port(), [], both, 0.1) as exchange:
        exchange.gather("facts", 1)
    with link_server() as served:
        pass
    for each in (port, served):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", each), 5)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "timed out"),
        (ConnectionRefusedError(111, "Connection refused"), "refused"),
        (socket.gaierror(-2, "Name or service not known"), "name does not resolve"),
        (OSError(113, "No route to host"), "no route to host"),
    ],
)
def test_reasons(error: OSError, words: str) -> None:
    assert why(error) == words


def test_links_are_measured_and_others_ports_are_told_apart() -> None:
    with link_server() as served:
        cost = measure_link("127.0.0.1", served)
    assert 0 < cost.alpha < 0.05
    assert 0 < cost.beta < 1e-6
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            channel, _ = other.accept()
            with channel:
                channel.sendall(b"220 mail\r\n")

        threading.Thread(target=answer).start()
        with pytest.raises(ConnectionError, match="another program answers there"):
            measure_link("127.0.0.1", other.getsockname()[1])

"""What the sides say to each other in an update: few messages, and a pull that ends leaves nothing behind."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from unisono import weights
from unisono.errors import CollectiveTimeout, MismatchError, UpdateError
from unisono.weights.exposed import Exposed
from unisono.weights.lead import Lead
from unisono.weights.wire import Broken, Connection

TCP = "tcp://127.0.0.1:0"
Pair = tuple[weights.Sender, weights.Receiver]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """A sender and a replica that show version 1, with a core each."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    with (
        weights.Sender(TCP, {"a": torch.ones(3)}, timeout=10) as sender,
        weights.Receiver(sender.address, {"a": torch.zeros(3)}, timeout=10, name="gen") as receiver,
    ):
        update = receiver.pull(background=True)
        sender.push()
        update.wait()
        yield sender, receiver


def pulling(pair: Pair) -> threading.Thread:
    """A thread that waits in a pull, as a caller's own does, of which the sender knows."""
    sender, receiver = pair
    thread = threading.Thread(target=receiver.pull)
    thread.start()
    known(sender)
    return thread


def known(sender: weights.Sender) -> None:
    """Returns once the sender knows that its replica waits."""
    assert sender._coordinator is not None
    member = sender._coordinator.parties["gen"].ranks[0]
    limit = time.monotonic() + 10
    while member.waiting is None and time.monotonic() < limit:
        time.sleep(0.001)


def test_who_waits_in_a_pull_is_ready_for_the_next_push(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = pair
    sent: list[str] = []
    send = Connection.send

    def noted(self: Connection, kind: str, data: bytes = b"", **fields: Any) -> None:
        sent.append(kind)
        send(self, kind, data, **fields)

    monkeypatch.setattr(Connection, "send", noted)
    thread = pulling(pair)
    sender.push()
    thread.join()
    assert sorted(sent) == sorted(["waits", "push", *["go", "moved", "decide"] * 2, "shown", "done"])
    assert receiver.version == 2


def test_a_pull_that_has_ended_is_not_waited_for_as_one_that_is_ready(pair: Pair) -> None:
    sender, receiver = pair
    with pytest.raises(CollectiveTimeout, match="has not called push"):
        receiver.pull(timeout=0.1)
    with pytest.raises(CollectiveTimeout, match=r"replica 'gen' rank 0 \(.*\) has not called pull"):
        sender.push(timeout=0.3)
    thread = pulling(pair)
    assert sender.push().receivers == ("gen",)
    thread.join()
    assert receiver.version == sender.version
    receiver.verify()


def test_what_others_do_to_a_model_is_seen_where_no_thread_waits(pair: Pair) -> None:
    """A pull in the background does not look ahead: its caller's thread may change the model until the push."""
    sender, receiver = pair
    update = receiver.pull(background=True)
    time.sleep(0.05)
    model = receiver._part.engine.module
    model["a"] = torch.zeros(4)
    with pytest.raises(MismatchError, match=r"float32 \[4\] is wanted"):
        sender.push()
    with pytest.raises(MismatchError, match=r"float32 \[4\] is wanted"):
        update.wait()


def test_a_pull_that_leaves_an_update_gives_it_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ready ahead, and was interrupted as the update began."""
    sender, receiver = pair
    wait = Connection.wait

    def interrupted(self: Connection, *given: Any) -> Any:
        message = wait(self, *given)
        if message is not None and message.kind == "announce" and message["call"] == 0:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return message

    monkeypatch.setattr(Connection, "wait", interrupted)
    caught: list[BaseException] = []

    def pull() -> None:
        try:
            receiver.pull()
        except KeyboardInterrupt as error:
            caught.append(error)

    thread = threading.Thread(target=pull)
    thread.start()
    known(sender)
    with pytest.raises(UpdateError, match="the update still waits"):
        sender.push(timeout=2.0)
    thread.join()
    assert caught
    assert receiver.version == 1
    thread = pulling(pair)
    sender.push()
    thread.join()
    assert receiver.version == sender.version == 2
    receiver.verify()


def test_an_announcement_that_crosses_a_pull_finds_the_memory_that_was_exposed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica reports what it has again, and makes nothing anew for that."""
    sender, receiver = pair
    made: list[int] = []
    make = Exposed.__init__

    def noted(self: Exposed, nbytes: int) -> None:
        made.append(nbytes)
        make(self, nbytes)

    monkeypatch.setattr(Exposed, "__init__", noted)
    monkeypatch.setattr(Lead, "_waits", lambda self, member, fields: came.set())
    for version in range(2, 9):
        came = threading.Event()
        thread = threading.Thread(target=receiver.pull)
        thread.start()
        assert came.wait(10)
        sender.push()
        thread.join()
        assert receiver.version == version
    receiver.verify()
    assert len(made) <= 2


def test_a_stranger_may_be_known_by_a_message_that_came_with_a_long_one() -> None:
    """A sender's rank does not wait for an answer before it pushes, with what it holds."""
    here, there = (Connection(sock, limit) for sock, limit in zip(socket.socketpair(), (1 << 30, 200), strict=True))
    try:
        here.hold_back("hello", rank=1)
        here.send("push", b"x" * 1000)
        first = there.receive()
        assert first is not None
        assert (first.kind, first["rank"]) == ("hello", 1)
        there.trust()
        second = there.receive()
        assert second is not None
        assert (second.kind, len(second.data)) == ("push", 1000)
        here.send("push", b"y")
        here.send("withdraw")
        assert [message.kind for message in (there.receive(), there.receive()) if message] == ["push", "withdraw"]
    finally:
        here.close()
        there.close()


def test_a_stranger_may_not_send_much() -> None:
    here, there = (Connection(sock, limit) for sock, limit in zip(socket.socketpair(), (1 << 30, 200), strict=True))
    try:
        here.hold_back("hello", rank=1)
        here.send("push", b"x" * 1000)
        assert there.receive() is not None
        with pytest.raises(Broken, match="not a message of unisono"):
            there.receive()
    finally:
        here.close()
        there.close()

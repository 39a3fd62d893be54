"""Wrong arguments are one clear line on the rank that passed them, at once, and the objects go on working."""

import json
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unisono import weights
from unisono.errors import CollectiveTimeout, UpdateError, UsageError
from weights.live import Net, apart, blank, fill, wrong

NAN = float("nan")
TCP = "tcp://127.0.0.1:0"
BOTH = [
    ({"timeout": 0}, "timeout=0: expected more than 0 seconds"),
    ({"timeout": None}, "timeout=None: expected more than 0 seconds"),
    ({"timeout": "5"}, "timeout='5': expected more than 0 seconds"),
    ({"timeout": NAN}, "timeout=nan: expected more than 0 seconds"),
    ({"rules": "x"}, "rules='x': expected a list of rules, such as [rename('model.*', '*')]"),
    ({"rules": 5}, "rules=5: expected a list of rules, such as [rename('model.*', '*')]"),
    ({"rules": [None]}, "rules=[None]: expected a list of rules"),
    ({"rules": [5]}, "rules=[5]: expected a list of rules, such as [rename('model.*', '*')]"),
    ({"shard": 5}, "shard=5: expected a mapping of patterns to dims or Shards, such as {'*.up.weight': 0}"),
    ({"shard": {"a": "x"}}, "expected a mapping of patterns to dims or Shards"),
    ({"shard": {5: 0}}, "expected a mapping of patterns to dims or Shards"),
    ({"shard": {"a": True}}, "expected a mapping of patterns to dims or Shards"),
    ({"group": "x"}, "group='x': expected None, 'self' or a process group"),
]
SENDERS = [
    ({"receivers": "1"}, "receivers='1': expected an int of at least 0"),
    ({"receivers": 1.5}, "receivers=1.5: expected an int of at least 0"),
    ({"receivers": -1}, "receivers=-1: expected an int of at least 0"),
    ({"bucket": "32MiB"}, "bucket='32MiB': expected an int of at least 1"),
    ({"bucket": 0}, "bucket=0: expected an int of at least 1"),
    ({"lost": None}, "lost=None: expected 'raise' or 'drop'"),
    ({"backend": "nccl"}, "backend='nccl': expected one that moves CPU tensors between hosts"),
    ({"delta": 1}, "delta=1: expected True or False"),
    ({"checksum": "no"}, "checksum='no': expected True or False"),
    ({"checksum": None}, "checksum=None: expected True or False"),
    ({"delta": True, "checksum": False}, "delta=True compares checksums: leave checksum=True"),
]
RECEIVERS = [
    ({"name": ""}, "name='': expected a text of 1 to 200 printable characters"),
    ({"name": "a\nb"}, "name='a\\nb': expected a text of 1 to 200 printable characters"),
    ({"mapped": "yes"}, "mapped='yes': expected True or False"),
    ({"mapped": None}, "mapped=None: expected True or False"),
]


def said(call: Callable[..., Any], *given: Any, **named: Any) -> str:
    """The text of the `UsageError`."""
    with pytest.raises(UsageError) as error:
        call(*given, **named)
    return str(error.value)


@pytest.mark.parametrize(("given", "text"), BOTH + SENDERS)
def test_a_sender_s(given: dict[str, Any], text: str) -> None:
    assert text in said(weights.Sender, TCP, {}, **given)


@pytest.mark.parametrize("source", [None, 5, [("a", torch.ones(2))]])
def test_a_senders_source(source: Any) -> None:
    assert "expected a module, a mapping of names to tensors, or a callable" in said(weights.Sender, TCP, source)


def test_a_source_that_is_none_replaces_none() -> None:
    with weights.Sender(TCP, {"a": torch.ones(2)}, receivers=0) as sender:
        assert "but 'b' is int" in said(sender.push, source={"b": 3})
        assert "got NoneType" in said(sender.push, source=lambda: None)
        assert sender.push().version == 1


@pytest.mark.parametrize(("given", "text"), BOTH + RECEIVERS)
def test_a_receiver_s(given: dict[str, Any], text: str, tmp_path: Path) -> None:
    assert text in said(weights.Receiver, f"file://{tmp_path}/meeting", {}, **given)


@pytest.mark.parametrize("path", ["\0", "%00", "{folder}/file/x", "/proc/nowhere/x"])
def test_a_file_that_can_not_be_made(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    address = f"file:///{path.format(folder=tmp_path).lstrip('/')}"
    text = said(weights.Sender, address, {})
    assert address in text or repr(address) in text


def test_a_file_s_name_may_have_any_characters(tmp_path: Path) -> None:
    names = ["a#1", "a#2", "a?x=1", "mötley crüe"]
    senders = [weights.Sender(f"file://{tmp_path}/{name}", {}) for name in names]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    for sender in senders:
        sender.close()


class LazyNet(nn.Module):
    """A module whose weight has no shape yet."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.LazyLinear(3)


KINDS = [
    (5, "expected a module or a mapping of names to tensors, got int"),
    ({"a": 5}, "a mapping must be of names to tensors, but 'a' is int"),
    ({5: torch.zeros(1)}, "a mapping must be of names to tensors, but 5 is Tensor"),
    ({"a": torch.zeros(2).to_sparse()}, "a is a torch.sparse_coo tensor: expected a dense one"),
    ({"a": torch.zeros(2, device="meta")}, "a is a meta tensor, without memory: give the model some, by `to_empty`"),
    (LazyNet(), "up.weight has no shape yet: run the model once"),
]


@pytest.mark.parametrize(("tensors", "text"), KINDS)
def test_what_can_not_be_sent_or_received(tensors: Any, text: str) -> None:
    good = {"a": torch.ones(2)}
    with weights.Sender(TCP, lambda: tensors, timeout=10) as sender:
        assert text in said(sender.push)
        assert text in said(lambda: sender.push(background=True).wait())
        if not isinstance(tensors, int):
            with weights.Receiver(sender.address, tensors, timeout=10, name="gen") as receiver:
                update = receiver.pull(background=True)
                with pytest.raises(UpdateError) as error:
                    sender.push(source=good)
                assert text in str(error.value)
                assert "replica 'gen' rank 0 (pid " in str(error.value)
                assert text in said(update.wait)
        with weights.Receiver(sender.address, {"a": torch.zeros(2)}, timeout=10) as receiver:
            update = receiver.pull(background=True)
            assert sender.push(source=good).version == update.wait().version == 1


@pytest.mark.parametrize("distant", [False, True], ids=["shared memory", "gloo"])
def test_calls(distant: bool) -> None:
    model = blank(Net())
    with (
        apart(distant),
        weights.Sender(TCP, fill(Net(), 1)) as sender,
        weights.Receiver(sender.address, model) as receiver,
    ):
        for timeout in (-1, "5", NAN):
            expected = f"timeout={timeout!r}: expected at least 0 seconds"
            assert said(sender.push, timeout=timeout) == said(receiver.pull, timeout=timeout) == expected
        for version in (-1, 1.0, "1", True):
            expected = f"version={version!r}: expected an int of at least 0, or None for the next"
            assert said(sender.push, version) == said(receiver.pull, version) == expected
        for call in (sender.push, receiver.pull):
            assert said(call, background=1) == "background=1: expected True or False"
        assert said(receiver.follow, 5) == "on_update=5: expected a function of one argument, or None"
        assert said(receiver.follow, None, "x") == "on_error='x': expected a function of one argument, or None"
        for late in (receiver.pull, sender.push):
            with pytest.raises(CollectiveTimeout):
                late(timeout=0)
        update = receiver.pull(background=True, timeout=float("inf"))
        assert [sender.push(1 << 70, timeout=float("inf")).version, update.wait(1e300).version] == [1 << 70] * 2
        assert [receiver.version, wrong(model, 1)] == [1 << 70, []]
        assert said(update.wait, "5") == "timeout='5': expected at least 0 seconds"


def test_a_closed_object_s() -> None:
    sender = weights.Sender(TCP, fill(Net(), 1))
    receiver = weights.Receiver(sender.address, blank(Net()))
    update = receiver.pull(background=True)
    sender.push()
    update.wait()
    sender.close()
    receiver.close()
    for call in (sender.push, sender.checksums):
        assert said(call) == f"this sender at {sender.address} was closed: make another"
    for call in (receiver.pull, receiver.follow, receiver.hold, receiver.checksums, receiver.verify):
        assert said(call) == f"this receiver at {sender.address} was closed: make another"
    sender.close()
    receiver.close()
    assert [sender.version, receiver.version] == [1, 1]


VALUES: list[tuple[Any, str]] = [
    (lambda: weights.fuse(["a", "b"], "c", dim="x"), "dim must be an int, got 'x'"),
    (lambda: weights.split("a", ["b"], sizes="x"), "sizes must be ints, got 'x'"),
    (lambda: weights.split("a", ["b", "c"], sizes=[-1, 3]), "sizes=(-1, 3): expected parts of at least 0 elements"),
    (lambda: weights.transpose("a", dims=5), "dims must be ints, got 5"),
    (lambda: weights.transpose("a", dims="ab"), "dims must be ints, got 'ab'"),
    (lambda: weights.cast("a", "float32"), "dtype='float32': expected one of torch's, such as torch.bfloat16, or None"),
    (lambda: weights.quantize("a", torch.int8, scale="s", dim=1.5), "dim must be an int, got 1.5"),
    (lambda: weights.Shard("x"), "dim of a Shard must be an int, got 'x'"),
    (lambda: weights.Shard(0, parts="x"), "parts of a Shard must be ints, got 'x'"),
    (lambda: weights.Shard(True), "dim of a Shard must be an int, got True"),
    (lambda: weights.Shard(0, parts=True), "parts of a Shard must be ints, got True"),
    (lambda: weights.fuse(None, "a"), "fuse takes a list of patterns, got None"),
    (lambda: weights.split("a", 5), "split takes a list of names, got 5"),
    (lambda: weights.quantize("a", [], "s"), "quantize to []: expected one of torch.int8"),
    (lambda: weights.layout({}, group=5), "group=5 is no process group"),
    (lambda: weights.layout({}, shard=5), "shard=5: expected a mapping of patterns to dims or Shards"),
    (lambda: weights.layout({}).split("x"), "world_size='x': expected an int of at least 1"),
    (lambda: weights.layout({}).split(True), "world_size=True: expected an int of at least 1"),
    (lambda: weights.layout({}).split(2, {"a": "x"}), "expected a mapping of patterns to dims or Shards"),
    (lambda: weights.layout({}).save(None), "cannot write None"),
    (lambda: weights.Layout.load(None), "cannot read None"),
    (lambda: weights.plan(weights.layout({}), None), "a plan is made of layouts, as layout(model) gives, got NoneType"),
    (lambda: weights.ModuleEngine(5), "module=5: expected a module, or a mapping of names to tensors"),
    (lambda: weights.ModuleEngine({}, standby="no"), "standby='no': expected True or False"),
    (
        lambda: weights.plan(weights.layout({}), weights.layout({}), bucket=1.5),
        "bucket=1.5: expected an int of",
    ),
]


@pytest.mark.parametrize(("make", "text"), VALUES)
def test_a_rule_s_and_a_layout_s(make: Callable[[], Any], text: str) -> None:
    assert text in said(make)


def message(fields: Any) -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack("<8sII", b"unisono1", len(text), 0) + text


STRANGERS = [b"HTTP/1.1 400\r\n\r\n", message([1]), message({"kind": "welcome"}), message({"kind": "refused"})]


@pytest.mark.parametrize("answer", STRANGERS)
def test_who_is_no_sender(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reply() -> None:
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert f"something else than a sender listens at {address}" in said(weights.Receiver, address, {})
        thread.join()

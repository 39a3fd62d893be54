"""A trainer on one host and a replica on another: updates between them, with the values and errors of one host."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hosts.conftest import Command, Network

PROGRAM = """
import sys
import torch
from unisono import weights
from unisono.errors import UnisonoError

def model(version):
    return {f"layer.{i}": torch.full((50, 7), 10.0 * version + i) for i in range(4)}

side, address, backend = sys.argv[1:]
if side == "trainer":
    with weights.Sender(address, model(0), backend=backend, timeout=30) as sender:
        for version in (1, 2):
            print("pushed", sender.push(source=model(version)).moved, flush=True)
        print("sums", sorted(sender.checksums().items()), flush=True)
        try:
            wrong = model(3) | {"layer.0": torch.zeros(7, 50)}
            sender.push(source=wrong)
        except UnisonoError as error:
            print(type(error).__name__, str(error).splitlines()[0], flush=True)
        try:
            while True:
                sender.push(source=model(4))
        except UnisonoError as error:
            print(type(error).__name__, str(error), flush=True)
else:
    mine = model(0)
    receiver = weights.Receiver(address, mine, name="generator", timeout=30)
    for version in (1, 2):
        receiver.pull()
        receiver.verify()
        assert all(torch.equal(mine[name], tensor) for name, tensor in model(version).items())
    print("sums", sorted(receiver.checksums().items()), flush=True)
    try:
        receiver.pull()
    except UnisonoError as error:
        print(type(error).__name__, str(error).splitlines()[0], flush=True)
    print("ready", receiver.version, flush=True)
    while True:
        receiver.pull()
"""


def wait_for(command: Command, words: str) -> str:
    """What the command has printed once it has printed these words."""
    end = time.monotonic() + 60
    while words not in command.text:
        assert command.running.poll() is None, command.text
        assert time.monotonic() < end, command.text
        time.sleep(0.05)
    return command.text


def printed(text: str, first: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(first)]


@pytest.mark.parametrize("backend", ["gloo", "unisono"])
def test_values_and_errors(backend: str, make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    net = make_hosts()
    (tmp_path / "program.py").write_text(PROGRAM)
    start = [sys.executable, f"{tmp_path}/program.py"]
    replica = net.start(1, [*start, "replica", "tcp://10.77.0.1:29600", backend])
    trainer = net.start(0, [*start, "trainer", "tcp://10.77.0.1:29600", backend])
    theirs = wait_for(replica, "ready 2")
    net.hosts.kill(1, replica.running.pid)
    code, mine = trainer.end()
    assert code == 0, mine
    assert printed(mine, "pushed") == ["pushed 5600"] * 2
    assert printed(mine, "sums") == printed(theirs, "sums") != []
    for text in (mine, theirs):
        assert len(printed(text, "MismatchError")) == 1, text
    assert "generator" in printed(mine, "PeerLostError")[0]

"""Processes that are killed, stopped or started again in the midst of updates: named everywhere, and it goes on."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from ranks import FORKS
from unisono import weights
from unisono.weights import participant
from weights.live import Net, attempt, blank, fill, meeting, raise_flag, replica, trainer, wait_for, wrong
from weights.test_failures import Watched

SOON = 1.5  # s


def _serve(pipe: Connection, role: Callable[..., Any], folder: str, given: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    pipe.send(role(folder, *given))


class Process:
    """A process that plays a role, and its result."""

    def __init__(self, role: Callable[..., Any], folder: Path, *given: Any) -> None:
        self._pipe, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=_serve, args=(theirs, role, str(folder), given), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, number: int) -> None:
        """Sends a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def result(self, limit: float = 30.0) -> Any:
        """What the role returned."""
        assert self._pipe.poll(limit), "no result in time"
        return self._pipe.recv()

    def end(self) -> None:
        """Ends it, whatever it does."""
        self.process.kill()
        self.process.join()


@contextmanager
def playing(folder: Path, *roles: tuple[Any, ...]) -> Iterator[list[Process]]:
    """Processes with these roles, each a function and what it is given after the folder."""
    found = [Process(role, folder, *given) for role, *given in roles]
    try:
        yield found
    finally:
        for process in found:
            process.end()


def sender_of_three(folder: str, lost: str) -> Any:
    model = Net()
    with trainer(folder, model, receivers=2, bucket=64, lost=lost) as sender:
        fill(model, 1)
        sender.push()
        fill(model, 2)
        error = attempt(sender.push)
        first = [error, sender.version, sender.receivers]
        fill(model, 3)
        return [*first, sender.push(3).receivers]


def killed_in_load(folder: str, name: str, dies: bool) -> Any:
    model = blank(Net())

    def act(tensor_name: str, tensor: Tensor) -> None:
        if dies and receiver.version == 1 and tensor_name == "up.bias":
            os.kill(os.getpid(), signal.SIGKILL)

    with replica(folder, Watched(model, act), name) as receiver:
        receiver.pull()
        error = attempt(receiver.pull)
        kept = [receiver.version, wrong(model, receiver.version or 0)]
        receiver.pull(3)
        return [error, kept, receiver.version, wrong(model, 3)]


def test_a_replica_is_killed(tmp_path: Path) -> None:
    roles = [(sender_of_three, "raise"), (killed_in_load, "gen-1", False), (killed_in_load, "gen-2", True)]
    with playing(tmp_path, *roles) as (sender, one, _):
        (error, *rest), (told, *found) = sender.result(), one.result()
    for name, text, seconds in (error, told):
        assert name == "PeerLostError"
        assert re.search(r"replica 'gen-2' rank 0 \(pid \d+ on .*\): it is dead: .*; version 2 was", text)
        assert seconds < SOON
    assert "version 1 is kept" in told[1]
    assert rest == [1, {"gen-1": 1}, ("gen-1",)]
    assert found == [[1, []], 3, []]


def sender_to_the_living(folder: str) -> Any:
    with trainer(folder, fill(Net(), 1), receivers=2, timeout=20.0) as sender:
        return [attempt(sender.push), sender.push(2).receivers]


def meets(folder: str, name: str, dies: bool) -> Any:
    """Pulls until it has version 2; ``dies``: before it begins to join the group in which data travels."""
    model = blank(Net())
    if dies:
        participant.group_here = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
    with replica(folder, model, name, timeout=20.0) as receiver:
        return [attempt(receiver.pull), receiver.pull().version, wrong(model, 1)]


def test_a_replica_is_killed_before_it_meets_the_others(tmp_path: Path) -> None:
    roles = [(sender_to_the_living,), (meets, "gen-1", False), (meets, "gen-2", True)]
    with playing(tmp_path, *roles) as (sender, one, _):
        (error, receivers), (told, *found) = sender.result(), one.result()
    for name, text, seconds in (error, told):
        assert name == "PeerLostError"
        assert re.search(r"replica 'gen-2' rank 0 \(pid \d+ on .*\): it is dead", text)
        assert seconds < SOON
    assert receivers == ("gen-1",)
    assert found == [2, []]


def test_a_lost_replica_is_left_out(tmp_path: Path) -> None:
    roles = [(sender_of_three, "drop"), (killed_in_load, "gen-1", False), (killed_in_load, "gen-2", True)]
    with playing(tmp_path, *roles) as (sender, one, _):
        (error, *rest), (told, *found) = sender.result(), one.result()
    assert error[0] == told[0] == ""
    assert rest == [2, {"gen-1": 2}, ("gen-1",)]
    assert found == [[2, []], 3, []]


def pushes(folder: str, version: int, more: int, flag: str = "") -> Any:
    model = fill(Net(), version)
    with trainer(folder, model, timeout=20.0) as sender:
        found = [sender.push(version).version]
        raise_flag(folder, f"pushed {version}")
        found += [sender.push().version for _ in range(more)]
        if flag:
            wait_for(folder, flag)
        return found


def pulls_from_each(folder: str) -> Any:
    model = blank(Net())
    with replica(folder, model, timeout=20.0) as receiver:
        receiver.pull()
        raise_flag(folder, "pulling")
        error = attempt(receiver.pull)
        raise_flag(folder, "next")
        kept = [receiver.version, wrong(model, 1)]
        receiver.pull()
        return [error, kept, receiver.version, wrong(model, 7)]


def test_a_sender_is_killed_and_another_comes(tmp_path: Path) -> None:
    with playing(tmp_path, (pushes, 1, 0, "never"), (pulls_from_each,)) as (sender, receiver):
        wait_for(str(tmp_path), "pulling")
        time.sleep(0.2)
        sender.send(signal.SIGKILL)
        wait_for(str(tmp_path), "next")
        with playing(tmp_path, (pushes, 7, 0)) as (another,):
            (name, text, _), *found = receiver.result()
            assert another.result() == [7]
    assert name == "PeerLostError"
    assert re.search(
        r"sender rank 0 \(pid \d+ on .*\): it is dead: .*, while this replica waited for it; version 1 is kept", text
    )
    assert found == [[1, []], 7, []]


def pulls_once(folder: str, name: str, then: str) -> Any:
    model = blank(Net())
    with replica(folder, model, name, timeout=20.0) as receiver:
        receiver.pull()
        raise_flag(folder, then)
        wait_for(folder, f"after {then}")
        return [receiver.version, wrong(model, receiver.version or 0)]


def pushes_twice(folder: str) -> Any:
    model = fill(Net(), 1)
    with trainer(folder, model, timeout=20.0) as sender:
        sender.push()
        wait_for(folder, "another")
        wait_for(folder, "joined")
        fill(model, 2)
        return sender.push().receivers


def joins(folder: str, name: str) -> Any:
    model = blank(Net())
    with replica(folder, model, name, timeout=20.0) as receiver:
        raise_flag(folder, "joined")
        receiver.pull()
        return [receiver.version, wrong(model, 2)]


def test_a_replica_starts_again_under_its_name(tmp_path: Path) -> None:
    with playing(tmp_path, (pushes_twice,), (pulls_once, "gen", "once")) as (sender, first):
        wait_for(str(tmp_path), "once")
        first.end()
        raise_flag(str(tmp_path), "another")
        with playing(tmp_path, (joins, "gen")) as (second,):
            assert second.result() == [2, []]
            assert sender.result() == ("gen",)


def pushes_to_a_stopped_one(folder: str) -> Any:
    model = fill(Net(), 1)
    with trainer(folder, model, receivers=2, timeout=20.0) as sender:
        sender.push()
        wait_for(folder, "stopped")
        fill(model, 2)
        error = attempt(sender.push, timeout=0.5)
        raise_flag(folder, "goes on")
        wait_for(folder, "runs")
        fill(model, 3)
        return [error, sender.version, sender.push(3).version]


def pulls_through(folder: str, name: str) -> Any:
    model = blank(Net())
    with replica(folder, model, name, timeout=20.0) as receiver:
        receiver.pull()
        raise_flag(folder, f"ready {name}")
        error = attempt(receiver.pull)
        if error[0]:
            receiver.pull()
        return [error, receiver.version, wrong(model, 3)]


def test_a_replica_is_stopped(tmp_path: Path) -> None:
    folder = str(tmp_path)
    roles = [(pushes_to_a_stopped_one,), (pulls_through, "gen-1"), (pulls_through, "gen-2")]
    with playing(tmp_path, *roles) as (sender, one, two):
        wait_for(folder, "ready gen-1")
        wait_for(folder, "ready gen-2")
        time.sleep(0.2)
        two.send(signal.SIGSTOP)
        raise_flag(folder, "stopped")
        wait_for(folder, "goes on")
        two.send(signal.SIGCONT)
        raise_flag(folder, "runs")
        error, *rest = sender.result()
        told, *found = one.result()
        stopped, *later = two.result()
    for (name, text, seconds), kind in ((error, "CollectiveTimeout"), (told, "UpdateError")):
        assert name == kind
        assert re.search(r"replica 'gen-2' rank 0 \(pid \d+ on .*\) has not come: it is stopped", text)
        assert seconds < 0.5 + SOON or kind == "UpdateError"
    assert stopped[0] in ("", "UpdateError")
    assert [rest, found, later] == [[1, 3], [3, []], [3, []]]


def pulls_from_a_stopped_one(folder: str) -> Any:
    model = blank(Net())
    with replica(folder, model, timeout=20.0) as receiver:
        receiver.pull()
        raise_flag(folder, "shown")
        wait_for(folder, "stopped")
        return [attempt(receiver.pull, timeout=0.5), receiver.version]


def test_a_sender_is_stopped(tmp_path: Path) -> None:
    with playing(tmp_path, (pushes, 1, 0, "never"), (pulls_from_a_stopped_one,)) as (sender, receiver):
        wait_for(str(tmp_path), "shown")
        sender.send(signal.SIGSTOP)
        raise_flag(str(tmp_path), "stopped")
        (name, text, seconds), version = receiver.result()
    assert name == "CollectiveTimeout"
    assert re.search(r"sender rank 0 \(pid \d+ on .*\) does not answer: it is stopped", text)
    assert seconds < 0.5 + SOON
    assert version == 1


def world(folder: str, rank: int, size: int, side: str) -> None:
    dist.init_process_group("unisono", init_method=f"file://{folder}/{side}", rank=rank, world_size=size)


def halves(folder: str, rank: int, dies: bool) -> Any:
    world(folder, rank, 2, "replica")
    model = blank({"w": Net().up.weight.new_empty(3, 4), "v": Net().up.weight.new_empty(5)})

    def act(name: str, tensor: Tensor) -> None:
        if dies and receiver.version == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    engine = Watched(model, act)
    receiver = weights.Receiver(meeting(folder), engine, shard={"w": 0}, name="gen", timeout=20.0)
    receiver.pull()
    shown = [receiver.version, sorted(receiver.checksums())]
    return [shown, attempt(receiver.pull), receiver.version]


def pushes_to_halves(folder: str) -> Any:
    model = fill({"w": Net().up.weight.new_empty(6, 4), "v": Net().up.weight.new_empty(5)}, 1)
    with trainer(folder, model, timeout=20.0) as sender:
        sender.push()
        fill(model, 2)
        return [attempt(sender.push), sender.version]


def test_a_rank_of_a_replica_is_killed(tmp_path: Path) -> None:
    with playing(tmp_path, (pushes_to_halves,), (halves, 0, False), (halves, 1, True)) as (sender, one, _):
        error, version = sender.result()
        shown, told, kept = one.result()
    assert shown == [1, ["v", "w"]]
    for name, text, seconds in (error, told):
        assert name == "PeerLostError"
        assert re.search(r"replica 'gen' rank 1 \(pid \d+ on .*\): it is dead: ", text)
        assert seconds < SOON
    assert [version, kept] == [1, 1]


@pytest.mark.parametrize("lost", ["raise", "drop"])
def test_a_replica_that_died_between_pushes_is_named(tmp_path: Path, lost: str) -> None:
    with playing(tmp_path, (pushes_after_death, lost), (pulls_once, "gen-1", "a"), (stays,)) as (sender, dies, two):
        wait_for(str(tmp_path), "a")
        wait_for(str(tmp_path), "b")
        dies.end()
        raise_flag(str(tmp_path), "dead")
        error, left_out, receivers = sender.result()
        assert two.result() == 2
    if lost == "raise":
        assert error[0] == "PeerLostError"
        assert "replica 'gen-1' rank 0" in error[1]
    else:
        assert [error[0], left_out] == ["", ["gen-1"]]
    assert receivers == ("gen-2",)


def pushes_after_death(folder: str, lost: str) -> Any:
    with trainer(folder, fill(Net(), 1), receivers=2, lost=lost, timeout=20.0) as sender:
        sender.push()
        wait_for(folder, "dead")
        found: list[weights.Report] = []
        error = attempt(lambda: found.append(sender.push(2)))
        report = found[0] if found else sender.push(2)
        return [error, list(report.lost), report.receivers]


def stays(folder: str) -> Any:
    with replica(folder, blank(Net()), "gen-2", timeout=20.0) as receiver:
        receiver.pull()
        raise_flag(folder, "b")
        receiver.pull()
        return receiver.version

"""What goes wrong in an update: each error on each rank, in time and with its words; the next update works."""

import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks import ranks
from unisono import weights
from weights.live import Net, apart, attempt, blank, fill, meeting, raise_flag, replica, trainer, wait_for, wrong

BOTH = pytest.mark.parametrize("distant", [False, True], ids=["shared memory", "gloo"])
SOON = 1.5  # s


class Watched(weights.ModuleEngine):
    """Calls ``act(name, tensor)`` for each tensor it loads."""

    def __init__(self, module: Any, act: Any, **given: Any) -> None:
        super().__init__(module, **given)
        self.act = act

    def load(self, bucket: Mapping[str, Tensor]) -> None:
        super().load(bucket)
        for name, tensor in bucket.items():
            self.act(name, tensor)


def load_raises(rank: int, world_size: int, folder: str, distant: bool, bad: str) -> Any:
    with apart(distant):
        if rank == 0:
            model = Net()
            with trainer(folder, model, receivers=2, bucket=64) as sender:
                sender.push(1) if fill(model, 1) else None
                fill(model, 2)
                return [attempt(sender.push), sender.push(fill(model, 3) and 3).version]
        model, failed = blank(Net()), []

        def act(name: str, tensor: Tensor) -> None:
            if rank == 2 and receiver.version == 1 and name == "up.bias" and not failed:
                failed.append(name)
                if bad == "raise":
                    raise ValueError("bad tensor")
                tensor.view(torch.uint8)[5] ^= 1

        with replica(folder, Watched(model, act), f"gen-{rank}") as receiver:
            receiver.pull()
            error = attempt(receiver.pull)
            kept = [receiver.version, wrong(model, 1)]
            return [error, kept, receiver.pull().version, wrong(model, 3)]


@BOTH
def test_what_a_load_raises_reaches_all(distant: bool, tmp_path: Path) -> None:
    sender, one, two = ranks(3, group=False).run(load_raises, str(tmp_path), distant, "raise")
    for name, text, seconds in (sender[0], one[0]):
        assert name == "UpdateError"
        for words in ("replica 'gen-2' rank 0 (pid", "ValueError: bad tensor", "while up.bias was loaded", "version 1"):
            assert words in text
        assert "version 2 was given up" in text
        assert seconds < SOON
    assert two[0][:2] == ["ValueError", "bad tensor\nversion 2 was given up, version 1 is kept"]
    assert [sender[1], one[1:], two[1:]] == [3, [[1, []], 3, []], [[1, []], 3, []]]


@BOTH
def test_a_changed_bit_is_found(distant: bool, tmp_path: Path) -> None:
    sender, one, two = ranks(3, group=False).run(load_raises, str(tmp_path), distant, "flip")
    for name, text, seconds in (sender[0], one[0], two[0]):
        assert name == "CorruptionError"
        words = (
            r"(?s)replica 'gen-2' rank 0 \(pid \d+ on .*\) found other .* in up.bias \(checksum \w{16}, sent \w{16}\)"
        )
        assert re.search(rf"{words}.*version 2 was .* version 1", text)
        assert seconds < SOON
    assert [sender[1], one[1:], two[1:]] == [3, [[1, []], 3, []], [[1, []], 3, []]]


def nobody_pulls(rank: int, world_size: int, folder: str) -> Any:
    if rank == 0:
        model = fill(Net(), 1)
        with trainer(folder, model) as sender:
            first = attempt(sender.push, timeout=0.3)
            wait_for(folder, "joined")
            second = attempt(sender.push, timeout=0.3)
            raise_flag(folder, "pull")
            return [first, second, sender.push().version]
    time.sleep(0.5)
    model = blank(Net())
    with replica(folder, model) as receiver:
        raise_flag(folder, "joined")
        wait_for(folder, "pull")
        return [receiver.pull().version, wrong(model, 1)]


def test_a_push_waits_its_time(tmp_path: Path) -> None:
    sender, pulled = ranks(2, group=False).run(nobody_pulls, str(tmp_path))
    first, second, version = sender
    assert first[0] == second[0] == "CollectiveTimeout"
    assert "0 replicas of 1 joined" in first[1]
    assert "start receivers with this address" in first[1]
    assert re.search(r"replica 'gen' rank 0 \(pid \d+ on .*\) has not called pull; version 1 was given up", second[1])
    assert max(first[2], second[2]) < 0.3 + SOON
    assert [version, pulled] == [1, [1, []]]


def pulls_in_vain(rank: int, world_size: int, folder: str) -> Any:
    if rank == 1:
        model = blank(Net())
        with replica(folder, model) as receiver:
            found = [attempt(receiver.pull, timeout=0.3)]
            raise_flag(folder, "alone")
            wait_for(folder, "there")
            found.append(attempt(receiver.pull, timeout=0.3))
            raise_flag(folder, "push")
            receiver.pull()
            raise_flag(folder, "close")
            wait_for(folder, "closed")
            found.append(attempt(receiver.pull, timeout=0.3))
            return [found, receiver.version]
    wait_for(folder, "alone")
    with trainer(folder, fill(Net(), 1)) as sender:
        raise_flag(folder, "there")
        wait_for(folder, "push")
        sender.push()
        wait_for(folder, "close")
    raise_flag(folder, "closed")
    return None


def test_a_pull_waits_its_time(tmp_path: Path) -> None:
    _, (found, version) = ranks(2, group=False).run(pulls_in_vain, str(tmp_path))
    assert [name for name, _, _ in found] == ["CollectiveTimeout"] * 3
    assert "no sender came to file://" in found[0][1]
    assert "no version is shown yet" in found[0][1]
    assert re.search(
        r"sender rank 0 \(pid .*\) is there but has not called push; it has pushed nothing yet", found[1][1]
    )
    assert re.search(r"the sender of pid \d+ on .* was there last \(it has closed\); version 1 is kept", found[2][1])
    assert max(seconds for _, _, seconds in found) < 0.3 + SOON
    assert version == 1


def holds(rank: int, world_size: int, folder: str) -> Any:
    if rank == 0:
        model = fill(Net(), 1)
        with trainer(folder, model) as sender:
            sender.push()
            wait_for(folder, "held")
            fill(model, 2)
            error = attempt(sender.push, timeout=0.4)
            raise_flag(folder, "let go")
            wait_for(folder, "shown")
            end = time.monotonic() + 10
            while sender.receivers != {"gen": 2} and time.monotonic() < end:
                time.sleep(0.005)  # the replica's message is on its way
            fill(model, 3)
            return [error, sender.version, sender.receivers, sender.push().version]
    model = blank(Net())
    with replica(folder, model) as receiver:
        receiver.pull()

        def hold() -> None:
            with receiver.hold() as version, receiver.hold():
                found.extend([version, attempt(receiver.pull)[:2]])
                raise_flag(folder, "held")
                wait_for(folder, "let go")
                found.append(wrong(model, 1))

        found: list[Any] = []
        thread = threading.Thread(target=hold)
        thread.start()
        wait_for(folder, "held")
        receiver.pull()
        thread.join()
        found += [receiver.version, wrong(model, 2)]
        raise_flag(folder, "shown")
        receiver.pull()
        return found


def test_a_version_waits_for_those_who_hold(tmp_path: Path) -> None:
    sender, found = ranks(2, group=False).run(holds, str(tmp_path))
    assert sender[0][0] == "CollectiveTimeout"
    assert re.search(r"version 2 stands, but replica 'gen' rank 0 .* still holds the version before", sender[0][1])
    assert sender[1:] == [2, {"gen": 2}, 3]
    assert found[0] == 1
    assert found[1][0] == "UsageError"
    assert "inside a hold of this thread" in found[1][1]
    assert found[2:] == [[], 2, []]


def in_place(rank: int, world_size: int, folder: str) -> Any:
    if rank == 0:
        model = Net()
        with trainer(folder, model, bucket=64) as sender:
            sender.push() if fill(model, 1) else None
            error = attempt(sender.push)
            return [error, sender.push(fill(model, 3) and 3).version]
    model = blank(Net())
    where = [t.data_ptr() for t in model.parameters()]

    def act(name: str, tensor: Tensor) -> None:
        if receiver.version == 1 and name == "norm.weight":
            raise OSError("disk")

    with replica(folder, Watched(model, act, standby=False)) as receiver:
        receiver.pull()
        error = attempt(receiver.pull)
        version = receiver.version
        receiver.pull()
        same = where == [t.data_ptr() for t in model.parameters()]
        return [error, version, receiver.version, wrong(model, 3), same]


def test_in_place_a_failure_leaves_no_version(tmp_path: Path) -> None:
    sender, (error, *found) = ranks(2, group=False).run(in_place, str(tmp_path))
    assert sender[0][0] == "UpdateError"
    assert error[0] == "OSError"
    assert "no version is shown until the next whole one" in error[1]
    assert [sender[1], found] == [3, [None, 3, [], True]]


class Uncommitted(weights.ModuleEngine):
    """Fails to show version 2."""

    def commit(self, version: int | None) -> None:
        super().commit(version)
        if version == 2:
            raise RuntimeError("no room")


def commit_raises(rank: int, world_size: int, folder: str) -> Any:
    if rank == 0:
        model = Net()
        with trainer(folder, model, receivers=2) as sender:
            sender.push() if fill(model, 1) else None
            error = attempt(sender.push)
            shown = sender.receivers
            return [error, sender.version, shown, sender.push().version]
    engine = Uncommitted(blank(Net())) if rank == 2 else blank(Net())
    with replica(folder, engine, f"gen-{rank}") as receiver:
        receiver.pull()
        error = attempt(receiver.pull)
        version = receiver.version
        receiver.pull()
        return [error, version, receiver.version]


def test_what_a_commit_raises(tmp_path: Path) -> None:
    sender, one, two = ranks(3, group=False).run(commit_raises, str(tmp_path))
    assert sender[0][0] == "UpdateError"
    words = r"version 2 stands, but replica 'gen-2' rank 0 \(pid .*\) raised RuntimeError: no room; it shows none until"
    assert re.search(words, sender[0][1])
    assert sender[1:] == [2, {"gen-1": 2, "gen-2": None}, 3]
    assert one == [["", "", one[0][2]], 2, 3]
    assert two[0][:2][0] == "RuntimeError"
    assert two[1:] == [None, 3]


def versions(rank: int, world_size: int, folder: str) -> Any:
    dist.init_process_group("unisono", init_method=f"file://{folder}/world", rank=rank, world_size=world_size)
    try:
        side = dist.new_group([0, 1])
        if rank == 2:
            model = blank(Net())
            with replica(folder, model) as receiver:
                return [attempt(receiver.pull), receiver.pull().version, wrong(model, 5)]
        model = fill(Net(), 5)
        with weights.Sender(meeting(folder), model, group=side, timeout=10) as sender:
            time.sleep(0.3)
            found = [attempt(sender.push, 3 + rank), sender.push(5).version, attempt(sender.push, 5)]
            return [*found, attempt(sender.push, -1)[:2], attempt(sender.push, True)[:2]]
    finally:
        dist.barrier()
        dist.destroy_process_group()


def test_versions(tmp_path: Path) -> None:
    one, two, receiver = ranks(3, group=False).run(versions, str(tmp_path))
    for name, text, _ in (one[0], two[0], receiver[0]):
        assert name == "MismatchError"
        assert "rank 0 passed 3, rank 1 passed 4" in text
        assert "-1" not in text
    for found in (one, two):
        assert found[1] == 5
        assert found[2][0] == "UsageError"
        assert "version 5 was passed to push, but version 5 has been pushed" in found[2][1]
        assert found[3][1] == "version=-1: expected an int of at least 0, or None for the next"
        assert "version=True" in found[4][1]
    assert receiver[1:] == [5, []]

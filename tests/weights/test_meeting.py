"""Addresses: forms, what may be there, who comes first, several meetings side by side, nothing left behind."""

import gc
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from backend.test_leaving import held
from ranks import ranks
from unisono import weights
from unisono.errors import CollectiveTimeout, UsageError
from weights.live import Net, blank, fill, wrong

GARBAGE = [b"GET / HTTP/1.1\r\n\r\n", b"unisono1" + b"\xff" * 64, b"unisono1" + bytes(8), b"\0" * 4096]


def pair(address: Any, **given: Any) -> tuple[weights.Sender, weights.Receiver, Any]:
    """A sender and a receiver in this process."""
    sender = weights.Sender(address, fill(Net(), 1), timeout=10, **given)
    model = blank(Net())
    return sender, weights.Receiver(address if "tcp" not in str(address) else sender.address, model, timeout=10), model


def updated(sender: weights.Sender, receiver: weights.Receiver) -> int:
    """Pushes and pulls once."""
    update = receiver.pull(background=True)
    sender.push()
    version: int = update.wait(10).version
    return version


def test_every_form(tmp_path: Path) -> None:
    for address in ("tcp://127.0.0.1:0", f"file://{tmp_path}/new/meeting", dist.HashStore()):
        sender, receiver, model = pair(address)
        assert [updated(sender, receiver), wrong(model, 1)] == [1, []]
        receiver.close()
        sender.close()
    assert stat.S_IMODE(os.stat(tmp_path / "new" / "meeting").st_mode) == 0o600


@pytest.mark.parametrize("address", ["udp://x:1", "tcp://127.0.0.1", "tcp://:5/x", "file://host/x", "/tmp/x", 7, None])
def test_other_forms_are_refused(address: Any) -> None:
    for make in (weights.Sender, weights.Receiver):
        with pytest.raises(UsageError, match=r"expected (tcp|file)://"):
            make(address, {})


def test_what_is_at_the_address(tmp_path: Path) -> None:
    address, path = f"file://{tmp_path}/meeting", tmp_path / "meeting"
    path.write_text("not a meeting")
    for make in (weights.Sender, weights.Receiver):
        with pytest.raises(UsageError, match="is not a meeting file: remove it, or use another path"):
            make(address, {})
    path.unlink()
    with weights.Sender(address, {}), pytest.raises(UsageError, match=r"is in use by the sender of pid \d+ on "):
        weights.Sender(address, {})
    with pytest.raises(UsageError, match="is no file"):
        weights.Receiver(f"file://{tmp_path}", {})


def test_something_else_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(UsageError, match=f"something else than a sender listens at tcp://127.0.0.1:{port}"):
            weights.Receiver(f"tcp://127.0.0.1:{port}", {})
        thread.join()
        with pytest.raises(UsageError, match="can not be listened at: Address already in use"):
            weights.Sender(f"tcp://127.0.0.1:{port}", {})


def test_garbage_at_the_port() -> None:
    sender, receiver, model = pair("tcp://127.0.0.1:0")
    host, port = sender.address.removeprefix("tcp://").split(":")
    strangers = []
    for data in GARBAGE:
        strangers.append(socket.create_connection((host, int(port))))
        strangers[-1].sendall(data)
    assert [updated(sender, receiver), wrong(model, 1), updated(sender, receiver)] == [1, [], 2]
    for stranger in strangers:
        stranger.close()
    receiver.close()
    sender.close()


def test_a_name_is_one_replica_s() -> None:
    with weights.Sender("tcp://127.0.0.1:0", {}) as sender:
        receiver = weights.Receiver(sender.address, {}, name="gen")
        with pytest.raises(UsageError, match=r"may not be named 'gen': replica 'gen' rank 0 \(pid \d+ on .*\) is"):
            weights.Receiver(sender.address, {}, name="gen")
        receiver.close()
        weights.Receiver(sender.address, {}, name="gen").close()


def side_by_side(rank: int, world_size: int, folder: str) -> Any:
    """Two meetings at once, each rank a sender in one and a replica in the other; the default groups stay usable."""
    own, other = (f"file://{folder}/{number}" for number in (rank, 1 - rank))
    source, model = fill(Net(), 5 + rank), blank(Net())
    with weights.Sender(own, source, group="self", timeout=10) as sender:
        with weights.Receiver(other, model, group="self", timeout=10) as receiver:
            update = receiver.pull(background=True)
            found = [sender.push(5 + rank).version, update.wait(10).version, wrong(model, 6 - rank)]
        dist.barrier()
    return found


def test_several_meetings_side_by_side(tmp_path: Path) -> None:
    assert ranks(2).run(side_by_side, str(tmp_path)) == [[5, 6, []], [6, 5, []]]


def again_and_again(rank: int, world_size: int, folder: str, restarts: int, updates: int) -> Any:
    """Nothing is kept of meetings that have ended, nor of updates."""

    def once(updates: int) -> None:
        sender, receiver, _ = pair(f"file://{folder}/{rank}")
        for _ in range(updates):
            updated(sender, receiver)
        receiver.close()
        sender.close()

    once(1)
    gc.collect()
    before = held()
    for number in range(restarts):
        once(1 + updates * (number == restarts // 2))
    gc.collect()
    return {key: (before[key], count) for key, count in held().items() if count > before[key]}


@pytest.mark.parametrize(
    ("restarts", "updates"), [(8, 10), pytest.param(50, 200, marks=[pytest.mark.soak, pytest.mark.timeout(300)])]
)
def test_nothing_is_left(restarts: int, updates: int, tmp_path: Path) -> None:
    assert ranks(1, group=False).run(again_and_again, str(tmp_path), restarts, updates) == [{}]


def world(rank: int, world_size: int, several: bool) -> Any:
    model = fill(Net(), 3) if rank == 0 or (several and rank == 1) else blank(Net())
    report = weights.sync(model, [0, 1] if several else 0, version=3)
    return [report.version, len(report.receivers), wrong(model, 3)]


@pytest.mark.parametrize("several", [False, True])
def test_sync(several: bool) -> None:
    assert ranks(3).run(world, several) == [[3, 2 - several, []]] * 3


def refused(rank: int, world_size: int) -> Any:
    found = []
    for src in (7, [], [0, 1, 2], [0, 0], None, 1.5, True, ["0"]):
        with pytest.raises(UsageError) as error:
            weights.sync({}, src)
        found.append(str(error.value).partition(":")[0])
    return found


def test_sync_refuses_other_ranks() -> None:
    for found in ranks(3).run(refused):
        given = ["7", "[]", "[0, 1, 2] are all ranks of the group", "[0, 0]", "None", "1.5", "True", "['0']"]
        assert found == [f"src={each}" for each in given]


def one_group_for_both(rank: int, world_size: int, folder: str, sends: int) -> Any:
    address = f"file://{folder}/meeting"
    if rank == 0:  # it waits for the other rank of its side
        side: Any = weights.Sender(address, {}) if sends == 0 else weights.Receiver(address, {})
        side.close()
        return ""
    with pytest.raises(UsageError) as error:
        weights.Sender(address, {}) if sends == 1 else weights.Receiver(address, {})
    return str(error.value)


@pytest.mark.parametrize("sends", [0, 1])
def test_both_sides_in_one_group(sends: int, tmp_path: Path) -> None:
    text = ranks(2).run(one_group_for_both, str(tmp_path), sends)[1]
    first, second = ("Sender", "Receiver") if sends == 0 else ("Receiver", "Sender")
    assert text.startswith(f"rank 0 of this group makes a {first}, this rank (1) a {second}: ")
    assert 'pass group="self"' in text


def test_nobody_comes() -> None:
    match = r"0 replicas of 1 joined in .* at tcp://127.0.0.1:\d+: start"
    with weights.Sender("tcp://127.0.0.1:0", {}) as sender, pytest.raises(CollectiveTimeout, match=match):
        sender.push(timeout=0.1)

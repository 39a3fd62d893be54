"""How a group issues messages of CUDA tensors, without any: streams, events and launches are recorded, not made."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unisono.backend import device_messages, device_work
from unisono.backend.device_messages import DeviceMessages
from unisono.errors import UsageError
from unisono.gpu.defaults import MESSAGE_NBYTES


class Log(list[tuple[Any, ...]]):
    """What happened, in order."""

    def stream(self, name: str) -> Any:
        """A stream whose calls are noted; its handle is its name."""
        return SimpleNamespace(
            cuda_stream=name,
            wait_event=lambda event: self.append((name, "waits for", event.at)),
            wait_stream=lambda other: self.append((name, "waits for", other.cuda_stream)),
        )

    def event(self) -> Any:
        event = SimpleNamespace(at="")

        def record(stream: Any) -> None:
            self.append((stream.cuda_stream, "has reached", "an event"))
            event.at = f"{len(self)} of {stream.cuda_stream}"

        event.record = record
        return event


class Kernels:
    """Notes launches, of two sends and two receives of sizes on one side of 100 bytes."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def fit(self, sends: list[int], receives: list[int]) -> bool:
        return len({size < 100 for size in (*sends, *receives)}) == 1 and max(len(sends), len(receives)) <= 2

    def launch(self, stream: str, sends: Any, receives: Any) -> None:
        self.log.append((stream, "sends", [s.peer for s in sends], "receives", [s.peer for s in receives]))


class Calls:
    """Whose failure a Work asks for."""

    failure = ""

    def check(self) -> None:
        if self.failure:
            raise UsageError(self.failure)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    found, names = Log(), iter(("first", "second", "third", "fourth"))
    current = found.stream("current")
    monkeypatch.setattr(device_messages, "new_stream", lambda device: found.stream(next(names)))
    monkeypatch.setattr(device_messages, "_free", {})
    for module in (device_messages, device_work):
        monkeypatch.setattr(module, "new_event", found.event)
        monkeypatch.setattr(module, "current_stream", lambda device: current)
    monkeypatch.setattr(device_work, "raw_stream", lambda index: 0)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    return found


def messages(log: Log, calls: Calls) -> DeviceMessages:
    """Of a group of 3 whose NCCL notes what it is asked for."""

    def check_rank(rank: int) -> None:
        if rank not in range(3):
            raise UsageError("no such rank")

    def noted(name: str) -> Any:
        return lambda *_: log.append((name,)) or name

    inner = SimpleNamespace(
        call=lambda name, tensors, peer, tag: log.append(("nccl", name, peer)) or "of nccl",
        group=SimpleNamespace(_start_coalescing=noted("starts"), _end_coalescing=noted("ends")),
    )
    group = SimpleNamespace(
        operations=SimpleNamespace(check_rank=check_rank),
        device_guard=SimpleNamespace(messages=SimpleNamespace(issued=lambda *_: None)),
    )
    kernels: Any = Kernels(log)
    made: Any = DeviceMessages(group, inner, torch.device("cpu"), kernels, calls.check)  # type: ignore[arg-type]
    return made


def launches(log: Log) -> list[tuple[Any, ...]]:
    return [entry for entry in log if "sends" in entry]


def test_each_direction_has_a_stream_between_the_current_one(log: Log) -> None:
    calls = Calls()
    here, x = messages(log, calls), torch.ones(4)
    sent, received = here.call("send", [[x], 1, 0]), here.call("recv", [[x], 1, 0])
    before = [("current", "has reached", "an event"), ("first", "waits for", "1 of current")]
    assert log[:4] == [*before, ("first", "sends", [1], "receives", []), ("first", "has reached", "an event")]
    assert launches(log) == [("first", "sends", [1], "receives", []), ("second", "sends", [], "receives", [1])]
    del log[:]
    received.wait()
    assert log == [("current", "waits for", "8 of second")]
    assert (sent.source_rank(), received.source_rank()) == (-1, 1)
    calls.failure = "the group has failed"
    with pytest.raises(UsageError, match="the group has failed"):
        sent.wait()
    assert not sent.is_success()


def test_a_batch_of_like_sizes_is_one_launch(log: Log) -> None:
    calls = Calls()
    here, x, y = messages(log, calls), torch.ones(4), torch.ones(1000)
    (work,) = here.batch([("recv", x, 2, 0), ("send", x, 1, 0)])
    assert launches(log) == [("first", "sends", [1], "receives", [2])]
    del log[:]
    work.wait()
    work.wait()
    assert log == [("current", "waits for", "4 of first")]
    assert work.source_rank() == -1
    here.batch([("recv", x, 2, 0), ("send", x, 1, 0)])
    here.batch([("recv", x, 2, 0), ("send", y, 1, 0)])
    assert [entry[0] for entry in launches(log)] == ["first", "second", "third"]
    here.batch([("recv", x, 2, 0), ("send", x, 1, 0), ("send", x, 2, 0), ("recv", x, 2, 0)])
    assert launches(log)[3:] == [("fourth", "sends", [1, 2], "receives", [2, 2])]
    here.batch([("send", x, 1, 0)] * 3)
    assert launches(log)[4:] == [("third", "sends", [1], "receives", [])] * 3
    assert [entry for entry in log if entry[1] == "waits for" and " of " not in entry[2]] == [
        ("second", "waits for", "first"), ("third", "waits for", "first"),
        ("fourth", "waits for", "second"), ("fourth", "waits for", "third"), ("third", "waits for", "fourth"),
    ]  # fmt: skip


def test_large_ones_go_to_nccl_together(log: Log) -> None:
    calls = Calls()
    here, x = messages(log, calls), torch.ones(MESSAGE_NBYTES // 4 + 1)
    assert here.call("send", [[x], 1, 0]) == "of nccl"
    works = here.batch([("send", x, 1, 0), ("recv", x[:3], 1, 0), ("recv", x, 1, 0)])
    assert log[-4:] == [("starts",), ("nccl", "send", 1), ("nccl", "recv", 1), ("ends",)]
    assert len(works) == 2
    assert len(launches(log)) == 1


def test_tensors_with_gaps_are_there_after_the_wait(log: Log) -> None:
    calls = Calls()
    here, out = messages(log, calls), torch.zeros(3, 2)[:, 0]
    work = here.call("recv", [[out], 1, 0])
    work._copies[0][1].fill_(5)
    assert out.tolist() == [0, 0, 0]
    work.wait()
    assert out.tolist() == [5, 5, 5]
    out.zero_()
    work.wait()
    assert out.tolist() == [0, 0, 0]


def test_what_a_functional_collective_gives_is_awaited(log: Log) -> None:
    class Pending(torch.Tensor):
        def trigger_wait(self) -> torch.Tensor:
            log.append(("awaited",))
            return self.as_subclass(torch.Tensor)

    messages(log, Calls()).call("send", [[torch.ones(4).as_subclass(Pending)], 1, 0])
    assert log[0] == ("awaited",)
    assert len(launches(log)) == 1


def test_nothing_is_launched_for_no_elements(log: Log) -> None:
    calls = Calls()
    assert messages(log, calls).call("send", [[torch.ones(0)], 1, 0]).wait()
    assert launches(log) == []


def test_mistakes(log: Log) -> None:
    calls = Calls()
    here, x = messages(log, calls), torch.ones(4)
    for name, arguments, words in (
        ("recv_anysource", [[x], 0], "needs src"), ("send", [[x, x], 1, 0], "2 tensors"),
        ("send", [[x], 5, 0], "no such rank"), ("send", [[x.to_sparse()], 1, 0], "give a plain tensor"),
        ("recv", [[torch.ones(2, MESSAGE_NBYTES).t()], 1, 0], "with gaps"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            here.call(name, arguments)
    assert log == []


def test_streams_are_left_to_later_groups(log: Log) -> None:
    calls = Calls()
    here, x = messages(log, calls), torch.ones(4)
    here.call("send", [[x], 1, 0])
    here.close()
    messages(log, calls).call("recv", [[x], 2, 0])
    assert [entry[0] for entry in launches(log)] == ["first", "first"]

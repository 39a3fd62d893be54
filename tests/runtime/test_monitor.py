"""What queues report to a monitor of a test's own: issued, met, completed, failed; what they ask while one waits."""

import os
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from unisono.errors import CollectiveTimeout, DeadlockError, MismatchError, PeerLostError, UnisonoError
from unisono.runtime.call import Call, Site
from unisono.runtime.choice import by_default
from unisono.runtime.collectives import CollectiveQueue, CollectiveTask
from unisono.runtime.message import Message, prepare_message
from unisono.runtime.messages import MessageQueue
from unisono.runtime.monitor import CallLog, Loss, Monitor
from unisono.runtime.prepared import AddressTable, Kind
from unisono.transport.board import Board
from unisono.transport.process import Identity
from unisono.transport.segment import Segment, create


class Shelf:
    """A store of one process."""

    def set(self, key: str, value: str) -> None: ...


class Events:
    """A monitor that records its calls. ``words``: its answer on a deadlock, ``gone``: ranks that are lost."""

    def __init__(self) -> None:
        self.call_log = CallLog([None] * 8, array("q", bytes(64)), array("q", bytes(64)))
        self.events: list[tuple[Any, ...]] = []
        self.words, self.gone = "", set[int]()

    def issued(self, call: Call, peer: int | None, tag: int) -> Any:
        self.events.append(("issued", call.op, peer, tag))
        return call.op

    def located(self, call_id: Any, site: Site) -> None: ...

    def met(
        self, call: Call, number: int, site: Site | None, headers: bytes, meet: Callable[[], bool]
    ) -> tuple[str, bool]:
        self.events.append(("met", call.op, number))
        return "they differ", True

    def completed(self, call_id: Any, source: int) -> None:
        self.events.append(("completed", call_id, source))

    def moved(self, call: Call, peer: int, tag: int, began: int) -> None:
        self.events.append(("moved", call.op, peer, tag))

    def failed(self, error: BaseException, call_id: Any = None) -> None:
        self.events.append(("failed", type(error).__name__, call_id))

    def gave_up(self, error: UnisonoError) -> None:
        self.events.append(("gave up", type(error).__name__))

    def waits(self, text: Callable[[], str], site: Site) -> "Events":
        self.events.append(("waits", text()))
        return self

    def check(self, needs: Sequence[Identity]) -> str:
        return self.words

    def end(self) -> None:
        self.events.append(("end",))

    def loss(self, rank: int) -> Loss | None:
        return Loss(f"rank {rank} is gone") if rank in self.gone else None

    def losses(self, missing: Sequence[int]) -> list[Loss]:
        return [Loss(f"rank {rank} is gone") for rank in missing if rank in self.gone]

    def lost(self, what: str, losses: Sequence[Loss]) -> PeerLostError:
        return PeerLostError(f"{what}: {losses[0].words}")

    def late(self, what: str, missing: Sequence[int]) -> CollectiveTimeout:
        return CollectiveTimeout(f"{what}\n  {list(missing)} late")


@pytest.fixture
def segment() -> Segment:
    made, fd = create(Shelf(), 2, "pair")  # type: ignore[arg-type]
    os.close(fd)
    return made


def queues(segment: Segment) -> tuple[MessageQueue, Events, MessageQueue, Events]:
    one, two = Events(), Events()
    monitors: list[Monitor] = [one, two]
    first, second = (MessageQueue(segment, rank, [0, 1], "the pair", monitors[rank]) for rank in (0, 1))
    return first, one, second, two


def message(op: str, peer: int, numel: int = 4, timeout: float = 10.0) -> Message:
    x = torch.zeros(numel)
    return Message(prepare_message(Call(op, x.dtype, (numel,)), 3, x.nbytes), peer, x, [x], timeout)


def test_messages_are_issued_and_completed(segment: Segment) -> None:
    first, one, second, two = queues(segment)
    first.submit(message("send", 1), background=True)
    second.submit(message("recv", 0), background=False)
    assert one.events == [("issued", "send", 1, 3), ("completed", "send", 1)]
    assert two.events == [("issued", "recv", 0, 3), ("completed", "recv", 0)]


def test_what_comes_second_to_a_receive_from_anybody_stays_in_its_ring(segment: Segment) -> None:
    """Both ranks have sent to rank 1, itself too, before it looks."""
    first, _, second, two = queues(segment)
    first.submit(message("send", 1), background=True)
    second.submit(message("send", 1), background=True)
    for source in (0, 1):
        got = message("recv", 0)
        got.peer = None
        second.submit(got, background=False)
        assert got.source == source
        assert [inbox.unclaimed() for inbox in second._in] == [[], []]
    assert two.events.count(("completed", "recv", 1)) == 1


def test_what_goes_at_once_is_reported_in_one(segment: Segment) -> None:
    first, one, second, two = queues(segment)
    x = torch.arange(4.0)
    prepared = {op: prepare_message(Call(op, x.dtype, (4,)), 3, x.nbytes) for op in ("send", "recv")}
    first.run_now(prepared["send"], 1, x, 10.0, False)
    got = torch.zeros(4)
    second.run_now(prepared["recv"], 0, got, 10.0, False)
    assert torch.equal(got, x)
    assert (one.events, two.events) == ([("moved", "send", 1, 3)], [("moved", "recv", 0, 3)])


def test_a_message_of_another_size_fails(segment: Segment) -> None:
    first, one, second, two = queues(segment)
    first.submit(message("send", 1, 4), background=True)
    with pytest.raises(MismatchError, match=r"rank 1 expects recv\(float32 \[5\]\) \(5 elements\) from rank 0"):
        second.submit(message("recv", 0, 5), background=False)
    assert two.events[1:] == [("completed", "recv", 0), ("failed", "MismatchError", None)]
    with pytest.raises(MismatchError, match="rank 1 refused a message of rank 0"):
        first.raise_rejected()
    assert ("gave up", "MismatchError") not in one.events + two.events


def test_the_rest_of_a_message_whose_memory_is_lost_half_way_is_dropped(segment: Segment) -> None:
    first, _, second, two = queues(segment)
    for queue in (first, second):
        queue._worker.wake = lambda: None  # type: ignore[method-assign]  # nothing moves but here
    large, small = message("send", 1, 1_000_000), message("send", 1)
    for task in (large, small):
        first.submit(task, background=True)
    got = message("recv", 0, 1_000_000)
    second.submit(got, background=True)
    assert not got.done
    assert not large.done
    got.memory.untyped_storage().resize_(0)
    with pytest.raises(UnisonoError, match="storage has been resized to 0 bytes while the recv of 4000000 bytes was"):
        second.finish(got)
    last = message("recv", 0)
    second.submit(last, background=True)
    for _ in range(100):
        first.poll(small)
        second.poll(last)
    assert small.done
    assert last.done
    assert large.error is small.error is last.error is None
    assert ("failed", "UnisonoError", "recv") in two.events


@pytest.mark.parametrize(
    ("trouble", "kind", "words"),
    [
        ("lost", PeerLostError, "rank 0 is gone"),
        ("late", CollectiveTimeout, "late"),
        ("stuck", DeadlockError, "a cycle"),
    ],
)
def test_a_wait_asks_the_monitor(segment: Segment, trouble: str, kind: type[UnisonoError], words: str) -> None:
    _, _, second, two = queues(segment)
    two.gone, two.words = {0} if trouble == "lost" else set(), "a cycle" if trouble == "stuck" else ""
    with pytest.raises(kind, match=words):
        second.submit(message("recv", 0, timeout=0.0 if trouble == "late" else 10.0), background=False)
    assert two.events[1][0] == "waits"
    assert "recv(float32 [4]) from rank 0 (tag 3, the pair) waits: 0 of 16 bytes moved" in two.events[1][1]
    assert two.events[2:] == [("failed", kind.__name__, "recv"), ("end",)]


def test_a_collective_is_met_with_headers_that_differ(segment: Segment) -> None:
    monitors = [Events(), Events()]
    queue = [CollectiveQueue(Board(segment, rank), [0, 1], "the pair", monitors[rank]) for rank in (0, 1)]
    errors: list[UnisonoError] = []

    def make(rank: int, op: str) -> None:
        choice = by_default("barrier", 0, 2, 0, False)
        prepared = queue[rank].preparer.prepare(Kind(Call(op), choice, torch.uint8, (0,)))
        task = CollectiveTask(prepared.call, [(prepared, AddressTable([]), AddressTable([]))], [], 10.0)
        try:
            queue[rank].submit(task, background=False)
        except UnisonoError as error:
            errors.append(error)

    for ops in (("barrier", "barrier"), ("barrier", "broadcast")):
        threads = [threading.Thread(target=make, args=(rank, op)) for rank, op in enumerate(ops)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert [type(error) for error in errors] == [MismatchError] * 2
    for rank, op in enumerate(("barrier", "broadcast")):
        assert [e for e in monitors[rank].events if e[0] in ("met", "failed", "gave up")] == [
            ("met", op, 2),
            ("failed", "MismatchError", None),
        ]
        assert [call.op for call in monitors[rank].call_log.calls if call] == ["barrier", op]
        assert queue[rank].calls == 2

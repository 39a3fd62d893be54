"""What an engine may call of its own receiver, and tensors that share memory."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from unisono import weights
from unisono.errors import CorruptionError, UpdateError, UsageError

TCP = "tcp://127.0.0.1:0"


class Calling(weights.ModuleEngine):
    """Calls something the first time that it loads or commits."""

    def __init__(self, act: Callable[[], Any], when: str, **given: Any) -> None:
        super().__init__({"a": torch.zeros(3)}, **given)
        self.act, self.when = act, when

    def _called(self, when: str) -> None:
        if when == self.when:
            self.when = ""
            self.act()

    def load(self, bucket: Mapping[str, Tensor]) -> None:
        super().load(bucket)
        self._called("load")

    def commit(self, version: int | None) -> None:
        if version is not None:
            self._called("commit")
        super().commit(version)


def nothing_held(receiver: weights.Receiver) -> None:
    with receiver.hold():
        pass


CALLS: list[tuple[str, Callable[[weights.Receiver], Any], bool, str]] = [
    ("load", lambda receiver: receiver.close(), True, "close was called in load or commit"),
    ("load", lambda receiver: receiver.pull(), True, "pull was called in load or commit"),
    ("commit", lambda receiver: receiver.close(), True, "close was called in load or commit"),
    ("load", nothing_held, False, "hold was called in load or commit"),
    ("commit", nothing_held, True, "hold was called in load or commit"),
    ("commit", lambda receiver: receiver.verify(), True, "hold was called in load or commit"),
]


@pytest.mark.parametrize(("when", "call", "standby", "words"), CALLS)
def test_an_engine_may_not_wait_for_its_own_update(
    when: str, call: Callable[[weights.Receiver], Any], standby: bool, words: str
) -> None:
    engine = Calling(lambda: call(receiver), when, standby=standby)
    with (
        weights.Sender(TCP, {"a": torch.ones(3)}, timeout=10) as sender,
        weights.Receiver(sender.address, engine, timeout=10, name="gen") as receiver,
    ):
        update = receiver.pull(background=True)
        with pytest.raises(UpdateError, match=f"replica 'gen' rank 0 .* raised UsageError: {words}"):
            sender.push()
        with pytest.raises(UsageError, match=words):
            update.wait(10)
        update = receiver.pull(background=True)
        assert sender.push().version == update.wait(10).version
        assert engine.live["a"].tolist() == [1, 1, 1]


def test_the_thread_that_follows_may_not_wait_for_itself() -> None:
    found: list[str] = []

    def on_update(report: weights.Report) -> None:
        with pytest.raises(UsageError) as error:
            receiver.pull()
        found.append(str(error.value))
        receiver.close()

    with weights.Sender(TCP, {"a": torch.ones(3)}, timeout=10) as sender:
        receiver = weights.Receiver(sender.address, {"a": torch.zeros(3)}, timeout=10)
        receiver.follow(on_update)
        sender.push()
        follower = receiver._follower
        assert follower is not None
        follower.join(10)
        assert not follower.is_alive()
    assert found == ["pull was called in the thread that follows, which it would wait for: leave it out"]
    assert receiver.closed


def views(memory: Tensor) -> dict[str, Tensor]:
    return {"whole": memory, "left": memory[:, :2], "right": memory[:, 2:]}


@pytest.mark.parametrize("standby", [True, False])
def test_tensors_that_share_memory_take_what_agrees(standby: bool) -> None:
    source, memory = torch.arange(12.0).reshape(3, 4), torch.zeros(3, 4)
    with weights.Sender(TCP, views(source), timeout=10) as sender:
        engine = weights.ModuleEngine(views(memory), standby=standby)
        with weights.Receiver(sender.address, engine, timeout=10, name="gen") as receiver:
            update = receiver.pull(background=True)
            assert sender.push().version == update.wait(10).version == 1
            assert torch.equal(memory, source)
            update = receiver.pull(background=True)
            odd = views(source) | {"left": torch.full((3, 2), 7.0)}
            words = "share memory, and what was sent to them does not agree: left, whole, right"
            with pytest.raises(CorruptionError, match=f"version 2 stands, but replica 'gen' rank 0 .* {words}"):
                sender.push(source=odd)
            with pytest.raises(CorruptionError, match=words):
                update.wait(10)
            assert receiver.version is None
            update = receiver.pull(background=True)
            assert sender.push(source=views(source)).version == update.wait(10).version == 3
            assert torch.equal(memory, source)

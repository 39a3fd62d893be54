"""Old or new, never a mix: threads that read while versions come, holds that outlast a push, any bit that changes.

Sender and receiver are in this process: what threads see is what matters here.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unisono import weights
from unisono.errors import CollectiveTimeout, CorruptionError
from weights.live import Net, attempt, blank, fill, wrong
from weights.test_failures import Watched


@contextmanager
def both(model: Any, engine: Any, **given: Any) -> Iterator[tuple[weights.Sender, weights.Receiver]]:
    """A sender and a receiver that have met."""
    settings_of = {"timeout": 20.0, "group": "self", **given}
    with (
        weights.Sender("tcp://127.0.0.1:0", model, **settings_of) as sender,
        weights.Receiver(sender.address, engine, name="gen", timeout=20.0, group="self") as receiver,
    ):
        yield sender, receiver


def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Waits until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)


@pytest.mark.parametrize("updates", [25, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
@pytest.mark.parametrize("commit", ["swap", "copy"])
def test_threads_see_one_version_whole(updates: int, commit: str) -> None:
    model, replica = Net(), blank(Net())
    mixed: list[Any] = []
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            with receiver.hold() as version:
                found = wrong(replica, version)
                if found:
                    mixed.append([version, found])
            time.sleep(0)

    with both(model, weights.ModuleEngine(replica, commit=commit), bucket=256) as (sender, receiver):
        receiver.follow()
        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for version in range(1, updates + 1):
            fill(model, version)
            assert sender.push().version == version
        ended.set()
        for reader in readers:
            reader.join()
        assert [mixed, receiver.version, wrong(replica, updates)] == [[], updates, []]


def test_a_version_that_was_held_off_is_shown_before_the_next_one_comes() -> None:
    model, replica = Net(), blank(Net())
    loads: list[str] = []
    engine = Watched(replica, lambda name, tensor: loads.append(name))
    with both(model, engine) as (sender, receiver):
        receiver.follow()
        sender.push() if fill(model, 1) else None
        with receiver.hold() as version:
            fill(model, 2)
            assert attempt(sender.push, timeout=0.3)[0] == "CollectiveTimeout"
            assert sender.receivers == {"gen": 1}
            loaded = len(loads)
            fill(model, 3)
            with pytest.raises(CollectiveTimeout, match=r"replica .gen. rank 0 .* still holds the version before"):
                sender.push(timeout=0.3)
            assert [version, len(loads), wrong(replica, 1)] == [1, loaded, []]
            later: list[Any] = []

            def read() -> None:
                with receiver.hold() as shown:
                    later.extend([shown, wrong(replica, shown)])

            reader = threading.Thread(target=read)
            reader.start()
            time.sleep(0.05)
            assert later == []  # the version that waits is not starved
        reader.join()
        assert later == [2, []]
        fill(model, 4)
        assert sender.push(4).version == 4
        assert [receiver.version, wrong(replica, 4), sender.receivers] == [4, [], {"gen": 4}]


def test_a_push_after_all_replicas_have_gone_goes_to_nobody() -> None:
    model = Net()
    with both(fill(model, 1), blank(Net())) as (sender, receiver):
        receiver.follow()
        sender.push()
        receiver.close()
        until(lambda: not sender.receivers)
        report = sender.push()
        assert [report.version, report.receivers, report.nbytes, sender.version] == [2, (), 0, 2]
        replica = blank(Net())
        with weights.Receiver(sender.address, replica, name="gen", timeout=20.0, group="self") as another:
            another.follow()
            fill(model, 3)
            assert sender.push().receivers == ("gen",)
            assert [another.version, wrong(replica, 3)] == [3, []]


KINDS = {
    "f32": torch.arange(300, dtype=torch.float32).view(20, 15),
    "bf16": torch.arange(77).to(torch.bfloat16),
    "f64": torch.arange(9, dtype=torch.float64).view(3, 3).t(),
    "i64": torch.arange(5),
    "i8": torch.arange(11, dtype=torch.int8),
    "flags": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
}


def test_any_bit_of_any_tensor_is_found() -> None:
    replica = {name: torch.zeros_like(tensor) for name, tensor in KINDS.items()}
    with both(KINDS, replica) as (sender, receiver):
        receiver.follow()
        sender.push()

        @settings(max_examples=150)
        @given(st.data())
        def run(data: st.DataObject) -> None:
            name = data.draw(st.sampled_from(sorted(KINDS)))
            raw: Tensor = replica[name].t() if name == "f64" else replica[name]
            raw = raw.reshape(-1).view(torch.uint8)
            place, bit = data.draw(st.integers(0, raw.numel() - 1)), data.draw(st.integers(0, 7))
            raw[place] ^= 1 << bit
            with pytest.raises(CorruptionError, match=f"{name} \\(checksum") as caught:
                receiver.verify()
            assert str(caught.value).count("(checksum") == 1
            raw[place] ^= 1 << bit

        run()
        receiver.verify()

"""The store of a line-up on one host: what it keeps, who may open it, and that updates ask no resolver."""

import gc
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.weights.live import Net, blank, fill, replica, trainer, wrong

from unisono.weights import participant, sending
from unisono.weights.memory_store import MemoryStore, StorePlace


def test_values_and_sums() -> None:
    made = MemoryStore()
    other = MemoryStore(made.place)
    made.set("a", "1\n2")
    assert not other.check(["a", "b"])
    other.set("b", "x")
    other.set("a", "3")
    assert made.check(["a", "b"])
    assert (made.get("a"), other.get("b")) == (b"3", b"x")
    assert [made.add("n", 2), other.add("n", 5), made.add("n", 0)] == [2, 7, 7]
    assert other.get("n") == b"7"


def test_a_value_that_does_not_come() -> None:
    with pytest.raises(RuntimeError, match="no rank has set late within"):
        MemoryStore(seconds=0.05).get("late")


def test_a_value_that_comes() -> None:
    made = MemoryStore()
    threading.Timer(0.05, MemoryStore(made.place).set, ("late", "x")).start()
    assert made.get("late") == b"x"


def _add(place: StorePlace, count: int, found: Any) -> None:
    store = MemoryStore(place)
    found.put([store.add("n", 1) for _ in range(count)])


def test_no_two_get_one_sum() -> None:
    made, context = MemoryStore(), multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    added = [context.Process(target=_add, args=(made.place, 500, found)) for _ in range(3)]
    for process in added:
        process.start()
    sums = [number for _ in added for number in found.get()]
    for process in added:
        process.join()
    assert sorted(sums) == list(range(1, 1501))


def test_it_is_gone_with_its_maker() -> None:
    made = MemoryStore()
    place = made.place
    del made
    gc.collect()
    with pytest.raises(OSError, match=r"[Ff]ile"):
        MemoryStore(place)


def test_another_file_in_its_place(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "checkpoint", os.O_RDWR | os.O_CREAT)
    place = MemoryStore().place._replace(pid=os.getpid(), fd=fd)
    with pytest.raises(OSError, match="another file"):
        MemoryStore(place)
    os.close(fd)
    assert not (tmp_path / "checkpoint").read_bytes()


def test_updates_on_one_host_ask_no_resolver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's stores do, for the name of every address that connects."""

    def refuse(*given: Any, **named: Any) -> None:
        raise AssertionError("a store of torch was made")

    monkeypatch.setattr(participant, "TCPStore", refuse)
    monkeypatch.setattr(sending, "TCPStore", refuse)
    model = blank(Net())
    with trainer(str(tmp_path), fill(Net(), 1)) as sender, replica(str(tmp_path), model) as receiver:
        pulled = receiver.pull(background=True)
        sender.push()
        assert pulled.wait().version == 1
    assert wrong(model, 1) == []


def test_a_line_that_is_not_whole_yet() -> None:
    made = MemoryStore()
    other = os.open(f"/proc/self/fd/{made.place.fd}", os.O_WRONLY | os.O_APPEND)
    os.write(other, b'["a", "1')
    assert not made.check(["a"])
    os.write(other, b'2"]\n')
    os.close(other)
    assert made.get("a") == b"12"

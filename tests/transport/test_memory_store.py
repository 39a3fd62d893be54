"""The store in memory: what `torch.distributed.Store` gives, in the order of all, whatever its processes do."""

import os
import signal
import threading
from pathlib import Path

import pytest

from ranks import ranks
from unisono.errors import CollectiveTimeout, PeerLostError
from unisono.transport.memory_store import MemoryStore


def adds(rank: int, world_size: int, address: str, times: int) -> list[int]:
    store = MemoryStore.open(address)
    sums = [store.add("counter", 1) for _ in range(times)]
    store.set(f"done/{rank}", f"rank {rank}\n")
    return sums


def test_every_sum_of_several_processes_comes_once() -> None:
    store = MemoryStore.create()
    sums = ranks(3, group=False).run(adds, store.address, 200)
    assert sorted(each for ranks_sums in sums for each in ranks_sums) == list(range(1, 601))
    assert all(each == sorted(each) for each in sums)
    assert store.add("counter", 0) == 600
    assert store.get("counter") == b"600"
    assert store.get("done/2") == b"rank 2\n"
    assert store.check(["done/0", "done/1"])
    assert not store.check(["done/0", "done/3"])


def test_the_last_value_counts() -> None:
    store = MemoryStore.create()
    other = MemoryStore.open(store.address)
    store.set("key", "old")
    other.set("key", "new")
    assert store.get("key") == other.get("key") == b"new"
    assert MemoryStore.open(store.address).get("key") == b"new"


def test_a_line_that_a_killed_process_left_torn_is_no_line() -> None:
    store = MemoryStore.create()
    fd = int(store.address.split()[1])
    store.set("a", "1")
    os.write(fd, b'\n["b", "tor')
    assert not store.check(["b"])
    store.set("c", "3")
    assert store.check(["a", "c"])
    assert not store.check(["b"])


def test_a_signal_handler_may_use_it_in_the_midst_of_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store, seen, read = MemoryStore.create(), [], os.pread

    def interrupted(*args: int) -> bytes:
        monkeypatch.setattr(os, "pread", read)
        found = read(*args)
        signal.raise_signal(signal.SIGUSR1)
        return found

    store.add("counter", 1)
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(store.add("counter", 1)))
    try:
        monkeypatch.setattr(os, "pread", interrupted)
        assert store.add("counter", 1) == 2
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [3]
    assert store.add("counter", 1) == 4


def test_threads_share_one() -> None:
    store, sums = MemoryStore.create(), []
    threads = [threading.Thread(target=lambda: sums.extend(store.add("n", 1) for _ in range(200))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sums) == list(range(1, 801))


def test_it_ends_with_its_process_s_reference() -> None:
    store = MemoryStore.create()
    address, fd = store.address, int(store.address.split()[1])
    other = MemoryStore.open(address)
    store.set("key", "value")
    del store
    assert not Path(f"/proc/self/fd/{fd}").exists()
    assert other.get("key") == b"value"
    with pytest.raises(PeerLostError, match="left the group before all had joined it"):
        MemoryStore.open(address)


def test_a_value_is_waited_for() -> None:
    store = MemoryStore.create()
    threading.Timer(0.05, MemoryStore.open(store.address).set, ("late", "x")).start()
    assert store.get("late") == b"x"
    with pytest.raises(CollectiveTimeout, match=r"no rank has set never in the store within 0\.05 s"):
        MemoryStore.open(store.address, seconds=0.05).get("never")


def test_another_file_in_its_place_is_left_alone(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "checkpoint", os.O_RDWR | os.O_CREAT)
    pid, _, inode = MemoryStore.create().address.split()
    with pytest.raises(PeerLostError, match="left the group"):
        MemoryStore.open(f"{pid} {fd} {inode}")
    os.close(fd)
    assert not (tmp_path / "checkpoint").read_bytes()

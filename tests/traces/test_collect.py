import json
import threading
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import profiler

from ranks import ranks
from traces.records import collecting, read_one
from unisono.errors import CollectiveTimeout
from unisono.trace import collect
from unisono.trace.collect import Collector
from unisono.trace.summary import summarize


def noted(rank: int, world_size: int, folder: str, compute: bool) -> None:
    """Make some calls under a collector."""
    group = dist.new_group()
    with collecting(folder, compute) as collector:
        x = torch.ones(50_000)
        for _ in range(5):
            if rank == 1:
                time.sleep(0.03)
            dist.all_reduce(x, group=group)
        work = dist.broadcast(x, 0, group, async_op=True)
        time.sleep(0.02)
        work.wait()
        (dist.send if rank == 0 else dist.recv)(x, 1 - rank, group)
        dist.barrier(group)
        dist.destroy_process_group(group)
        collector.write()


def test_what_a_rank_does_is_noted(tmp_path: Path) -> None:
    ranks(2).run(noted, str(tmp_path), False)
    records = read_one(tmp_path)
    assert [record.rank for record in records] == [0, 1]
    for record in records:
        mine = [call for call in record.calls if call.group != "the default group"]
        assert [call.op for call in mine if not call.message] == ["all_reduce"] * 5 + ["broadcast", "barrier"]
        assert [call.op for call in mine if call.message] == ["send" if record.rank == 0 else "recv"]
        reduces = [call for call in mine if call.op == "all_reduce"]
        assert {call.nbytes for call in reduces} == {200_000}
        assert all("test_collect.py" in call.site for call in reduces)
        assert all(call.end - call.begin >= sum(e - b for b, e in call.reductions) for call in reduces)
    waits = [call for call in records[0].calls if call.op == "all_reduce" and call.group != "the default group"]
    assert median(call.wait[1] - call.wait[0] for call in waits) > 15e6
    summary = summarize(records, lambda *_: 0.0)
    assert summary.slowest == 1


def test_compute_events_come_along(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    ranks(2).run(noted, str(folder), True)
    for record in read_one(folder):
        assert record.compute is not None
        names = {event.get("name") for event in json.loads(record.compute.read_text())["traceEvents"]}
        assert {"unisono:all_reduce", "aten::ones"} <= names


def waits_in_torch(rank: int, world_size: int, folder: str) -> None:
    """Rank 0 computes for 20 ms and waits in torch's C++ for rank 1, which comes 40 ms later."""
    waits = Path(folder, "waits")
    dist.barrier()
    with collecting(folder) as collector:
        if rank == 1:
            while not waits.exists():
                time.sleep(0.001)
            time.sleep(0.04)
        future = dist.all_reduce(torch.ones(4), async_op=True).get_future()
        if rank == 0:
            until = time.thread_time() + 0.02
            while time.thread_time() < until:
                pass
            waits.touch()
        future.wait()
        collector.write()


def test_a_wait_that_no_method_of_ours_sees_is_exposed(tmp_path: Path) -> None:
    ranks(2).run(waits_in_torch, str(tmp_path))
    zero = summarize(read_one(tmp_path), lambda *_: 0.0).ranks[0]
    assert zero.overlapped >= 0.015
    assert zero.waiting >= 0.02


def two_default_groups(rank: int, world_size: int, folder: str) -> None:
    with collecting(folder):
        for k in (1, 2):
            store = f"file://{folder}/store-{k}"
            dist.init_process_group("unisono", init_method=store, rank=rank, world_size=world_size)
            for _ in range(k):
                dist.all_reduce(torch.ones(4))
            dist.destroy_process_group()


def test_default_groups_one_after_another_are_all_noted(tmp_path: Path) -> None:
    ranks(2, group=False).run(two_default_groups, str(tmp_path))
    for record in read_one(tmp_path):
        found = [(call.group, call.number) for call in record.calls]
        assert found == [("the default group", 1), ("the default group (2)", 1), ("the default group (2)", 2)]
        assert len(record.groups) == 2


def many(rank: int, world_size: int, folder: str) -> None:
    """Make 20 calls where 8 calls and 8 times are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect, "KEPT", 8)
        patch.setenv("UNISONO_FLIGHT", "8")
        with collecting(folder) as collector:
            group = dist.new_group()
            for _ in range(20):
                dist.all_reduce(torch.ones(4), group=group)
            collector.write()
            dist.destroy_process_group(group)


def test_of_more_calls_than_are_kept_the_last_ones_count(tmp_path: Path) -> None:
    ranks(2).run(many, str(tmp_path))
    records = read_one(tmp_path)
    for record in records:
        numbers = [call.number for call in record.calls if call.group != "the default group"]
        assert numbers == list(range(numbers[0], 21))
        assert 13 <= numbers[0] <= 16
        assert len(record.spans) <= 8
    summary = summarize(records, lambda *_: 0.0)
    assert summary.partial
    assert "up to the last call (before that there were more calls than are kept)" in summary.words()[0]
    assert summary.exposed > 0.01


def reduce_and_wait(group: Any, background: bool) -> None:
    work = dist.all_reduce(torch.ones(4), group=group, async_op=background)
    if background:
        work.get_future().wait()


def loses_a_peer(rank: int, world_size: int, folder: str, background: bool, compute: bool) -> list[bool]:
    """Whether rank 0 has its record when the program hears of the loss, and torch's events in the end."""
    group = dist.new_group()
    with collecting(folder, compute) as collector:
        dist.all_reduce(torch.ones(4), group=group)
        if rank == 1:
            dist.destroy_process_group(group)
            collector.write()
            return []
        with pytest.raises(RuntimeError, match="has left the group"):
            reduce_and_wait(group, background)
        at_once = {"".join(file.suffixes) for file in Path(folder).glob("rank-0-*")}
        collector.write()
        return [".json" in at_once, bool(list(Path(folder).glob("rank-0-*.compute.json")))]


@pytest.mark.parametrize("compute", [False, True])
@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_loses_a_peer_writes_at_once(tmp_path: Path, background: bool, compute: bool) -> None:
    found = ranks(2).run(loses_a_peer, str(tmp_path), background, compute)
    assert found == [[True, compute], []]


def test_two_threads_write_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector(tmp_path)
    other = threading.Thread(target=collector.write, daemon=True)
    found: list[bool] = []

    def noted() -> dict[str, Any]:
        if not found:
            other.start()
            other.join(0.2)
            found.append(other.is_alive())
        return {}

    monkeypatch.setattr(collector, "_noted", noted)
    monkeypatch.setattr(collector, "entries", {"a call": None})
    collector.write()
    other.join(10)
    assert found == [True]
    assert not other.is_alive()


def waits_in_vain(rank: int, world_size: int, folder: str) -> list[Path]:
    """What rank 0 has written after a wait that was too short for a call, which goes on."""
    group = dist.new_group()
    with collecting(folder):
        if rank == 1:
            dist.barrier()
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        if rank == 0:
            with pytest.raises(CollectiveTimeout, match="of this wait"):
                work.wait(timedelta(milliseconds=10))
        written = list(Path(folder).iterdir())
        if rank == 0:
            dist.barrier()
        work.wait()
        dist.destroy_process_group(group)
        return written


def test_a_wait_that_is_too_short_is_no_fault(tmp_path: Path) -> None:
    assert ranks(2).run(waits_in_vain, str(tmp_path)) == [[], []]


def profiled(rank: int, world_size: int, folder: str) -> list[str]:
    handler = torch.profiler.tensorboard_trace_handler(folder, worker_name=f"rank{rank}")
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, on_trace_ready=handler) as profile, profiler.record_function("mine"):
        everything_once(rank, world_size)
    return sorted({event.name for event in profile.events()})


def everything_once(rank: int, world_size: int) -> None:
    x, whole = torch.ones(8), torch.ones(8 * world_size)
    dist.all_reduce(x)
    dist.all_reduce(torch.ones(1 << 19))
    for late in range(world_size):  # beyond the time that a call waits for its peers when it is issued
        time.sleep(0.03 * (rank == late))
        dist.all_reduce(x, async_op=True).wait()
    dist.broadcast(x, 0)
    dist.reduce(x, 0)
    dist.all_gather([torch.empty(8) for _ in range(world_size)], x)
    dist.all_to_all_single(whole, whole.clone())
    dist.gather(x, [torch.empty(8) for _ in range(world_size)] if rank == 0 else None)
    dist.scatter(x, list(whole.chunk(world_size)) if rank == 0 else None)
    dist.barrier()
    if rank < 2:
        (dist.send if rank == 0 else dist.recv)(x, 1 - rank)


def test_names_are_visible_to_torch_profiler_and_tensorboard(tmp_path: Path) -> None:
    wanted = {"all_reduce", "wait all_reduce", "broadcast", "reduce", "all_gather", "all_to_all", "gather", "scatter"}
    found = ranks(2).run(profiled, str(tmp_path))
    for rank, names in enumerate(found):
        wanted_here = {f"unisono:{name}" for name in wanted | {"barrier", "send" if rank == 0 else "recv"}}
        assert wanted_here <= set(names), wanted_here - set(names)
        (file,) = tmp_path.glob(f"rank{rank}.*.pt.trace.json")
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
        assert {"unisono:all_reduce", "mine"} <= {event.get("name") for event in events}

"""The flight record, read by PyTorch's own analyzer and checked entry by entry."""

import gc
import os
import pickle
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono
from hangs.job import Job, attempt, hurry, tell
from ranks import FORKS
from unisono.runtime.call import Call, piece
from unisono.torch_names import all_gather_single, reduce_scatter_single
from unisono.watch.flight import CollectiveRecord, MessageRecord, dump_flight_record
from unisono.watch.fr_schema import sizes


def _analyze(folder: Path) -> str:
    """What PyTorch's analyzer says of a directory; it must be able to read it."""
    said = folder.with_name(f"{folder.name}-said")
    analyzer = FORKS.Process(target=_be_the_analyzer, args=(folder, said))
    analyzer.start()
    analyzer.join(100)
    assert analyzer.exitcode == 0, said.read_text()
    return said.read_text()


def _be_the_analyzer(folder: Path, said: Path) -> None:
    """`python -m torch.distributed.flight_recorder.fr_trace folder`, in a process that has torch already."""
    with said.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = ["fr_trace", str(folder)]
    runpy.run_module("torch.distributed.flight_recorder.fr_trace", run_name="__main__", alter_sys=True)


def _entries(folder: Path, rank: int) -> list[dict[str, Any]]:
    return pickle.loads((folder / f"flight_rank_{rank}").read_bytes())["entries"]


def every_operation(rank: int, world_size: int, folder: str) -> str:
    x, wide = torch.ones(4, 3), torch.zeros(4 * world_size, 3)
    rows = [torch.zeros(4, 3) for _ in range(world_size)]
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    dist.broadcast(x, 0)
    dist.reduce(x, 1)
    dist.barrier()
    all_gather_single(wide, x)
    dist.all_gather(rows, x)
    dist.all_gather([torch.zeros(r + 1) for r in range(world_size)], torch.ones(rank + 1))
    reduce_scatter_single(x, wide)
    dist.reduce_scatter(x, rows)
    dist.reduce_scatter(torch.zeros(rank + 1), [torch.ones(r + 1) for r in range(world_size)])
    dist.gather(x, rows if rank == 0 else None)
    dist.scatter(x, rows if rank == 1 else None, src=1)
    dist.all_to_all_single(torch.empty_like(wide), wide)
    dist.all_to_all([torch.zeros(rank + 1) for _ in rows], [torch.ones(r + 1) for r in range(world_size)])
    if rank == 0:
        dist.send(x, 1, tag=3)
        dist.send(x, 2)
    else:
        dist.recv(x, 0 if rank == 1 else None, tag=3 * (rank == 1))
    group = dist.new_group([0, 2])
    if rank != 1:
        dist.all_reduce(x, group=group)
    return str(unisono.dump_flight_record(folder))


def test_the_analyzer_finds_a_sound_job_sound(tmp_path: Path) -> None:
    with Job(every_operation, 3, str(tmp_path)) as job:
        files = job.results()
    assert files == [str(tmp_path / f"flight_rank_{rank}") for rank in range(3)]
    said = _analyze(tmp_path)
    assert not any(word in said for word in ("Not all ranks", "error", "mismatch", "cannot")), said
    entries = _entries(tmp_path, 0)
    assert [e["profiling_name"].split(":")[1] for e in entries[:3]] == ["all_reduce", "all_reduce", "broadcast"]
    scattered = [e["input_sizes"] for e in entries if "reduce_scatter" in e["profiling_name"]]
    assert scattered[-1] in ([[1], [2], [3]], [[3, 3]])  # the latter for the analyzer before torch 2.13
    assert {e["state"] for e in entries} == {"completed"}
    assert all(e["time_created_ns"] <= e["time_discovered_completed_ns"] < time.time_ns() for e in entries)


def late_rank(rank: int, world_size: int, folder: str) -> str:
    os.environ["UNISONO_FLIGHT_DIR"] = folder
    hurry(0.5)
    if rank == 2:
        time.sleep(1.5)
        return ""
    try:
        dist.all_reduce(torch.ones(5))
    except unisono.CollectiveTimeout as error:
        return type(error).__name__  # once this has returned, a peer that fails too may ask for the record again
    return ""


def test_a_timeout_saves_the_record_of_all_ranks_and_the_analyzer_names_the_missing_one(tmp_path: Path) -> None:
    with Job(late_rank, 3, str(tmp_path)) as job:
        assert job.results() == ["CollectiveTimeout", "CollectiveTimeout", ""]
    said = _analyze(tmp_path)
    assert "Not all ranks joining collective, sequence number: 2" in said
    assert "missing ranks: {2}" in said
    assert "late_rank at" in said


def asked_later(rank: int, world_size: int, folder: str) -> None:
    def fails() -> None:
        attempt(lambda: dist.all_reduce(torch.ones(5)))

    hurry(0.3)
    if rank == 0:
        fails()
        unisono.dump_flight_record(folder)
    else:
        time.sleep(0.8)


def test_a_record_made_after_a_call_failed_still_has_its_line(tmp_path: Path) -> None:
    """Its function has returned by then: a peer that fails too asks for the record a moment later."""
    with Job(asked_later, 2, str(tmp_path)) as job:
        job.results()
    *_, last = _entries(tmp_path, 0)
    assert (last["profiling_name"].split(":")[1], last["state"]) == ("all_reduce", "started")
    assert [frame["name"] for frame in last["frames"]] == ["<lambda>"]


def disagreeing(rank: int, world_size: int, folder: str) -> str:
    os.environ["UNISONO_FLIGHT_DIR"] = folder
    dist.barrier()
    x = torch.ones(5)
    return attempt(lambda: dist.broadcast(x, 0) if rank == 2 else dist.all_reduce(x)).kind


def test_a_mismatch_saves_the_record_and_the_analyzer_sees_it(tmp_path: Path) -> None:
    with Job(disagreeing, 3, str(tmp_path)) as job:
        assert job.results() == ["MismatchError"] * 3
    said = _analyze(tmp_path)
    assert "Culprit rank 2; Error type: COLLECTIVE_TYPE_MISMATCH" in said
    assert _entries(tmp_path, 2)[1]["frames"][0]["name"] == "<lambda>"


def background(rank: int, world_size: int, folder: str) -> None:
    if rank == 0:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        unisono.dump_flight_record(folder)
        tell("dumped")
        work.wait()
    else:
        time.sleep(0.5)
        dist.all_reduce(torch.ones(5))


def test_a_call_in_the_background_has_its_line(tmp_path: Path) -> None:
    with Job(background, 2, str(tmp_path)) as job:
        job.hear("dumped", [0])
        (entry,) = _entries(tmp_path, 0)
        job.results()
    assert (entry["state"], entry["frames"][0]["name"]) == ("started", "background")


def unheard(rank: int, world_size: int, folder: str) -> None:
    dist.barrier()
    if rank == 0:
        attempt(lambda: dist.recv(torch.zeros(2), 2))
    else:
        tell("there")
        time.sleep(20)


def test_a_receive_without_a_send_names_the_sender(tmp_path: Path) -> None:
    from unisono.watch import status_page
    from unisono.watch.status import snapshot

    with Job(unheard, 3, str(tmp_path)) as job:
        job.hear("there", [1, 2])
        time.sleep(0.3)
        (found,) = snapshot(job.pid(0))
        assert status_page.records(found.identities, str(tmp_path)) == {
            r: str(tmp_path / f"flight_rank_{r}") for r in range(3)
        }
    said = _analyze(tmp_path)
    assert "group info: the default group, messages 2->0" in said
    assert "missing ranks: {2}" in said


def test_entries_start_with_the_first_call_that_all_ranks_still_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_FLIGHT", "4")
    record = CollectiveRecord("the default group", [0, 1], 0, lambda: (9, 7, 10))
    for number in range(1, 10):
        place = number % 4
        record.call_log.calls[place], record.call_log.issue_times[place] = Call("barrier"), 100 * number
        if number <= 7:
            record.call_log.end_times[place] = 100 * number + 10
    found = [(e.number, e.state, e.when, e.ended) for e in record.entries()]
    assert found == [(7, "completed", 700, 710), (8, "started", 800, 0), (9, "scheduled", 900, 0)]


def test_messages_are_numbered_per_direction_and_tag() -> None:
    record = MessageRecord("g", [4, 7], 1)
    send, recv = Call("send", torch.float32, (2,)), Call("recv", torch.float32, (2,))
    first = record.issue(recv, 0, 0)
    anyone = record.issue(recv, None, 0)
    record.issue(recv, None, 0)
    record.issue(recv, 0, 0)
    record.issue(send, 0, 5)
    record.end(anyone, 0)
    record.end(first, 0)
    found = [(e.label, e.global_ranks, e.number, e.state, e.way) for e in record.entries()]
    assert found == [
        ("g, messages 4->7", [4, 7], 2, "completed", (0, 1)),
        ("g, messages 4->7", [4, 7], 1, "completed", (0, 1)),
        ("g, messages 4->7", [4, 7], 3, "started", (0, 1)),
        ("g, messages 7->4 tag 5", [4, 7], 1, "started", (1, 0)),
    ]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (Call("barrier"), ("barrier", [], [])),
        (Call("all_reduce", torch.float32, (2, 3), "SUM"), ("all_reduce", [[2, 3]], [[2, 3]])),
        (Call("all_gather", torch.float32, (2, 3), extra_signature="single"), ("all_gather", [[2, 3]], [[2, 2, 3]])),
        (Call("reduce_scatter", torch.float32, (4, 3), "SUM"), ("reduce_scatter", [[4, 3]], [[6]])),
        (
            Call("reduce_scatter", torch.float32, (1,), "SUM", parts=(1, 2)),
            ("reduce_scatter_v", [[1], [2]], [[1], [2]]),
        ),
        (
            Call("all_to_all", torch.float32, sends=(piece((1,)), piece((2,))), expects=(piece((1,)), piece((3,)))),
            ("all_to_all", [[3]], [[4]]),
        ),
        (
            Call("gather", torch.float32, root=0, sends=(piece((5,)), 0), expects=(0, 0)),
            ("gather", [[5]], []),
        ),
    ],
)
def test_sizes(call: Call, expected: tuple[str, list[list[int]], list[list[int]]]) -> None:
    assert sizes(call, 2) == expected


def test_a_record_may_be_asked_for_while_one_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = MessageRecord("g", [0, 1], 0)
    write = Path.write_bytes
    asked = iter([True])

    def interrupted(path: Path, data: bytes) -> int:
        if next(asked, False):  # by a signal handler
            dump_flight_record(tmp_path)
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    assert dump_flight_record(tmp_path) == tmp_path / "flight_rank_0"
    assert _entries(tmp_path, 0) == []
    assert [path.name for path in tmp_path.iterdir()] == ["flight_rank_0"]
    del record
    gc.collect()  # a stack that was looked at holds itself


def test_mistakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(unisono.UsageError, match="in no group"):
        dump_flight_record(tmp_path)
    record = MessageRecord("g", [0, 1], 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(unisono.UsageError, match=r"cannot write the flight record .*/file/flight_rank_0"):
        dump_flight_record(tmp_path / "file")
    del record
    monkeypatch.setenv("UNISONO_FLIGHT", "many")
    with pytest.raises(unisono.UsageError, match="UNISONO_FLIGHT is 'many'"):
        MessageRecord("g", [0, 1], 0)

"""Calls on GPUs in a trace: what is noted in a rank (GPUs are stood in for), and what becomes of it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from traces.records import call, collecting, read_one, write
from unisono.backend.device_group import METHODS, TwoDeviceGroup
from unisono.runtime.call import Call
from unisono.trace.chrome import write_trace
from unisono.trace.devices import DeviceNotes
from unisono.trace.page import report_page
from unisono.trace.summary import DeviceSum, summarize

CALL = Call("all_reduce", torch.float32, (256,), "SUM")


class Calls:
    """Stands for a group's calls on GPUs: some go by kernels, some by an inner group, some are not issued at all."""

    def __init__(self, notes: DeviceNotes) -> None:
        guard = SimpleNamespace(number=0, last_call=CALL)
        self.group = SimpleNamespace(nonce="abc", label="the default group", global_ranks=[0, 1], device_guard=guard)
        self.inner = notes.carrying(lambda: "by NCCL")
        self.call, self.again = notes.noting(Calls.issue), notes.noting(Calls.known)

    def issue(self, way: str) -> str:
        if way == "packed":
            return str(self.call(self, "kernel"))
        self.group.device_guard.number += 1
        return str(self.inner()) if way == "NCCL" else "launched"

    def known(self, known: bool) -> str | None:
        return self.issue("kernel") if known else None


def test_what_is_issued_is_noted_once_with_its_way() -> None:
    notes = DeviceNotes()
    calls = Calls(notes)
    assert calls.again(calls, False) is None
    assert [calls.call(calls, way) for way in ("kernel", "NCCL", "packed")] == ["launched", "by NCCL", "launched"]
    assert calls.again(calls, True) == "launched"
    del calls.group.device_guard  # the group has been left
    calls.again(calls, False)
    assert [(number, way) for _, number, _, way, _, _ in notes.noted] == [
        (1, "kernel"), (2, "NCCL"), (3, "kernel"), (4, "kernel"),
    ]  # fmt: skip
    assert all(begin <= end for *_, begin, end in notes.noted)


def test_groups_of_both_devices_are_wrapped(tmp_path: Path) -> None:
    before = dict(vars(TwoDeviceGroup))
    with collecting(tmp_path):
        changed = [name for name in METHODS if vars(TwoDeviceGroup)[name] is not before[name]]
    assert changed == list(METHODS)


def device_call(number: int, way: str, begin: int, **other: Any) -> dict[str, Any]:
    words = "all_reduce(float32 [256], SUM)"
    plain = {"group": "the default group", "op": "all_reduce", "nbytes": 1024, "words": words, "end": begin + 20_000}
    return {**plain, "number": number, "way": way, "begin": begin, **other}


def test_a_trace_of_gpus_alone(tmp_path: Path) -> None:
    issued = [device_call(1, "kernel", 1000), device_call(2, "kernel", 2000), device_call(3, "NCCL", 3000, nbytes=9000)]
    for rank in (0, 1):
        write(tmp_path, rank, device_calls=issued)
    records = read_one(tmp_path)
    summary = summarize(records, lambda op, nbytes, ranks: 0.0)
    assert summary.device == (
        DeviceSum("all_reduce", "NCCL", 1, 9000, pytest.approx(2e-5)),
        DeviceSum("all_reduce", "kernel", 2, 2048, pytest.approx(2e-5)),
    )
    assert summary.seconds == pytest.approx(22_000e-9)
    line = "on GPUs a rank issues 2 all_reduce by kernel, 2 KiB in all; its host spends 20 µs on each"
    assert line in summary.words()
    assert "<h2>Calls on GPUs</h2>" in report_page(summary, "trace.json", "")
    write_trace(tmp_path / "trace", records)
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "on GPUs" and event["pid"] == 0] == [
        "all_reduce by kernel", "all_reduce by kernel", "all_reduce by NCCL",
    ]  # fmt: skip


def test_kernels_that_the_profiler_saw_have_tracks_of_their_streams(tmp_path: Path) -> None:
    write(tmp_path, 0, calls=[call(1, 1000, 2000)])
    kernel = {"ph": "X", "cat": "kernel", "name": "one_shot", "tid": 7, "ts": 1.0, "dur": 2.0}
    profiled = [kernel, kernel | {"cat": "cpu_op", "name": "aten::add"}]
    (tmp_path / "rank-0-100.compute.json").write_text(json.dumps({"traceEvents": profiled}))
    write_trace(tmp_path / "trace", read_one(tmp_path))
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"GPU, stream 7", "torch.profiler, thread 7"} <= names
    tracks = {event["name"]: event["tid"] for event in events if event["name"] in ("one_shot", "aten::add")}
    assert len(set(tracks.values())) == 2

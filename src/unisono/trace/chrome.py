"""The trace as https://ui.perfetto.dev and chrome://tracing open it: a process per rank. Never imports torch.

Format: "Trace Event Format", JSON object form; times in microseconds from the first event. Tracks of a rank: what its
threads do in calls and waits; the calls under way, each with its phases below it; calls on GPUs, as its host issues
them; and, if asked for, what torch.profiler saw, on GPUs a track per stream.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from unisono.drawing.trace import name_event, span_event
from unisono.trace.record import CallRecord, RankRecord

__all__ = ["write_trace"]

_Event = dict[str, Any]
_THREADS, _FLIGHT, _DEVICE, _COMPUTE = 0, 100, 900, 1000  # track numbers
_PROFILED = ("cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset")


def write_trace(path: Path, records: Sequence[RankRecord]) -> None:
    """Write all ranks into one file."""
    events = [event for record in records for event in _events(record)]
    timed = [event for event in events if "ts" in event]
    origin = min((event["ts"] for event in timed), default=0)
    for event in timed:
        event["ts"], event["dur"] = (event["ts"] - origin) / 1e3, event["dur"] / 1e3
    about = {"program": records[0].program, "ranks": len(records)}
    data = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


def _events(record: RankRecord) -> Iterator[_Event]:
    """All of one rank, with times in nanoseconds of the host's clock."""
    rank = record.rank
    yield name_event("process_name", rank, name=f"rank {rank} (pid {record.pid} on {record.host})")
    yield name_event("process_sort_index", rank, sort_index=rank)
    threads = list(dict.fromkeys([record.main, *(span.thread for span in record.spans)]))
    for at, thread in enumerate(threads):
        name = "main thread, in unisono" if thread == record.main else f"thread {thread}, in unisono"
        yield name_event("thread_name", rank, _THREADS + at, name=name)
    for span in record.spans:
        place = rank, _THREADS + threads.index(span.thread)
        yield span_event(span.name, "in unisono", span.begin, span.end, place, {"from": span.site})
    for begin, end in record.still:
        yield span_event("stands still", "exposed", begin, end, (rank, _THREADS), {})
    free: list[int] = []
    for call in record.calls:
        at = next((k for k, until in enumerate(free) if until <= call.begin), len(free))
        if at == len(free):
            free.append(0)
            name = "under way" if at == 0 else f"under way ({at + 1})"
            yield name_event("thread_name", rank, _FLIGHT + at, name=name)
        free[at] = call.end
        yield from _call(call, (rank, _FLIGHT + at))
    if record.device_calls:
        yield name_event("thread_name", rank, _DEVICE, name="calls on GPUs, as issued by the host")
    for issued in record.device_calls:
        words = {"call": issued.words, "nbytes": issued.nbytes, "group": issued.group, "number": issued.number}
        name, place = f"{issued.op} by {issued.way}", (rank, _DEVICE)
        yield span_event(name, "on GPUs", issued.begin, issued.end, place, words)
    yield from _computing(record)


def _call(call: CallRecord, place: tuple[int, int]) -> Iterator[_Event]:
    arguments = {
        "call": call.words,
        "nbytes": call.nbytes,
        "group": call.group,
        "number": call.number,
        "from": call.site,
        "late_us": call.late / 1e3,
    }
    yield span_event(call.op, "call", call.begin, call.end, place, arguments)
    for name, pieces in (("wait", [call.wait]), ("reduce", call.reductions), ("move", call.moves)):
        for begin, end in pieces:
            if begin < end:
                yield span_event(name, "phase", begin, end, place, {})


def _computing(record: RankRecord) -> Iterator[_Event]:
    """torch.profiler's events, on the same clock."""
    if record.compute is None:
        return
    data = json.loads(record.compute.read_text(encoding="utf-8"))
    base = int(data.get("baseTimeNanoseconds", 0)) - record.clock
    threads: dict[Any, int] = {}
    for event in data["traceEvents"]:
        if event.get("ph") != "X" or event.get("cat") not in _PROFILED:
            continue
        on_gpu = event["cat"] in _PROFILED[2:]
        track = on_gpu, event["tid"]
        if track not in threads:
            threads[track] = _COMPUTE + len(threads)
            name = f"GPU, stream {event['tid']}" if on_gpu else f"torch.profiler, thread {event['tid']}"
            yield name_event("thread_name", record.rank, threads[track], name=name)
        begin, place = event["ts"] * 1e3 + base, (record.rank, threads[track])
        yield span_event(event["name"], event["cat"], begin, begin + event["dur"] * 1e3, place, {})

"""The trace as https://ui.perfetto.dev and chrome://tracing open it: a process per rank. Never imports torch.

Format: "Trace Event Format", JSON object form; times in microseconds from the first event. Tracks of a rank: what its
threads do in calls and waits; the calls under way, each with its phases below it; and, if asked for, what
torch.profiler saw.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from unisono.trace.record import CallRecord, RankRecord

__all__ = ["write_trace"]

_Event = dict[str, Any]
_THREADS, _FLIGHT, _COMPUTE = 0, 100, 1000  # track numbers


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
    yield _named("process", rank, 0, f"rank {rank} (pid {record.pid} on {record.host})")
    yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
    threads = list(dict.fromkeys([record.main, *(span.thread for span in record.spans)]))
    for at, thread in enumerate(threads):
        name = "main thread, in unisono" if thread == record.main else f"thread {thread}, in unisono"
        yield _named("thread", rank, _THREADS + at, name)
    for span in record.spans:
        place = {"pid": rank, "tid": _THREADS + threads.index(span.thread)}
        yield _slice(span.name, "in unisono", (span.begin, span.end), place, {"from": span.site})
    for still in record.still:
        yield _slice("stands still", "exposed", still, {"pid": rank, "tid": _THREADS}, {})
    free: list[int] = []
    for call in record.calls:
        at = next((k for k, until in enumerate(free) if until <= call.begin), len(free))
        if at == len(free):
            free.append(0)
            yield _named("thread", rank, _FLIGHT + at, "under way" if at == 0 else f"under way ({at + 1})")
        free[at] = call.end
        yield from _call(call, {"pid": rank, "tid": _FLIGHT + at})
    yield from _computing(record)


def _call(call: CallRecord, place: _Event) -> Iterator[_Event]:
    arguments = {
        "call": call.words,
        "nbytes": call.nbytes,
        "group": call.group,
        "number": call.number,
        "from": call.site,
        "late_us": call.late / 1e3,
    }
    yield _slice(call.op, "call", (call.begin, call.end), place, arguments)
    for name, pieces in (("wait", [call.wait]), ("reduce", call.reductions), ("move", call.moves)):
        for begin, end in pieces:
            if begin < end:
                yield _slice(name, "phase", (begin, end), place, {})


def _computing(record: RankRecord) -> Iterator[_Event]:
    """torch.profiler's events, on the same clock."""
    if record.compute is None:
        return
    data = json.loads(record.compute.read_text(encoding="utf-8"))
    base = int(data.get("baseTimeNanoseconds", 0)) - record.clock
    threads: dict[Any, int] = {}
    for event in data["traceEvents"]:
        if event.get("ph") != "X" or event.get("cat") not in ("cpu_op", "user_annotation"):
            continue
        if event["tid"] not in threads:
            threads[event["tid"]] = _COMPUTE + len(threads)
            yield _named("thread", record.rank, threads[event["tid"]], f"torch.profiler, thread {event['tid']}")
        yield {
            "name": event["name"],
            "cat": event["cat"],
            "ph": "X",
            "ts": event["ts"] * 1e3 + base,
            "dur": event["dur"] * 1e3,
            "pid": record.rank,
            "tid": threads[event["tid"]],
        }


def _slice(name: str, kind: str, when: tuple[int, int], place: _Event, arguments: _Event) -> _Event:
    begin, end = when
    return {"name": name, "cat": kind, "ph": "X", "ts": begin, "dur": end - begin, **place, "args": arguments}


def _named(what: str, rank: int, track: int, name: str) -> _Event:
    return {"name": f"{what}_name", "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}

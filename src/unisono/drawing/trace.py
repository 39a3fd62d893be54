"""A timeline as a trace that chrome://tracing and https://ui.perfetto.dev open: a process per rank, arrows per message.

Format: "Trace Event Format", JSON object form; times in microseconds.
"""

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.drawing.gantt import pipeline_heading
from unisono.drawing.messages import chunk_range, title
from unisono.simulation import PipelineTimeline, Timeline
from unisono.units import show_nbytes

__all__ = ["draw_trace", "name_event", "span_event"]


def draw_trace(timeline: Timeline | PipelineTimeline) -> str:
    """JSON text. Each rank has tracks for what it sends and receives, as many as overlap; of a pipeline one track.

    Raises UsageError if the timeline has too many events to keep.
    """
    made = _messages(timeline) if isinstance(timeline, Timeline) else _actions(timeline)
    return json.dumps(made, ensure_ascii=False)


def _actions(timeline: PipelineTimeline) -> dict[str, Any]:
    """An event per action; a unit of time is a second."""
    events: list[dict[str, Any]] = []
    for rank, row in enumerate(timeline.slots):
        events += [
            name_event("process_name", rank, name=f"rank {rank}"),
            name_event("thread_name", rank, 0, name="actions"),
        ]
        for action, start, end in row:
            made = span_event(str(action), action.kind, start * 1e6, end * 1e6, (rank, 0), action._asdict())
            events.append(made)
    return {"traceEvents": events, "otherData": {"schedule": pipeline_heading(timeline)}}


def _messages(timeline: Timeline) -> dict[str, Any]:
    e, schedule = timeline.events, timeline.schedule
    tracks = {"sends": (e.src, _tracks(e.src, e.start, e.end)), "receives": (e.dst, _tracks(e.dst, e.start, e.end))}
    events = _names(schedule.world_size, tracks)
    for i in range(len(e)):
        chunks, sign = chunk_range(int(e.chunk[i]), int(e.count[i])), "+" if e.reduce[i] else "="
        begin, end = float(e.start[i]) * 1e6, float(e.end[i]) * 1e6
        arguments = {
            "step": int(e.step[i]),
            "piece": int(e.piece[i]),
            "from": int(e.src[i]),
            "to": int(e.dst[i]),
            "chunks": chunks,
            "size": show_nbytes(float(e.nbytes[i])),
            "nbytes": float(e.nbytes[i]),
            "reduce": bool(e.reduce[i]),
        }
        for side, peer, flow, at in (("sends", e.dst[i], "s", begin), ("receives", e.src[i], "f", end)):
            rank, track = int(tracks[side][0][i]), _thread_id(side, int(tracks[side][1][i]))
            name = f"{'→' if side == 'sends' else '←'}{peer} {chunks} {sign}"
            events.append(span_event(name, side, begin, end, (rank, track), arguments))
            bound = {"bp": "e"} if flow == "f" else {}
            message = {"name": "message", "cat": "message", "ph": flow, "id": i, "ts": at}
            events.append({**message, **bound, "pid": rank, "tid": track})
    about = {"schedule": title(schedule), "topology": timeline.topology.describe(), "nbytes": timeline.nbytes}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}


def _thread_id(side: str, track: int) -> int:
    """Thread ids: sends above receives, each with room for many tracks."""
    return track + (0 if side == "sends" else 1000)


def _names(world_size: int, tracks: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]) -> list[dict[str, Any]]:
    """The names of the tracks, and their order."""
    found = {
        (int(r), side, int(k)) for side, (ranks, which) in tracks.items() for r, k in zip(ranks, which, strict=True)
    }
    events: list[dict[str, Any]] = []
    for rank in sorted({rank for rank, _, _ in found}):
        name = f"rank {rank}" if rank < world_size else f"switch {rank}"
        events += [name_event("process_name", rank, name=name), name_event("process_sort_index", rank, sort_index=rank)]
    for rank, side, track in sorted(found):
        name = side if track == 0 else f"{side} ({track + 1})"
        events.append(name_event("thread_name", rank, _thread_id(side, track), name=name))
    return events


def name_event(what: str, rank: int, track: int = 0, **arguments: object) -> dict[str, Any]:
    """A metadata event: the name of a process or a thread, or its place among them."""
    return {"name": what, "ph": "M", "pid": rank, "tid": track, "args": arguments}


def span_event(
    name: str, kind: str, begin: float, end: float, place: tuple[int, int], arguments: dict[str, Any]
) -> dict[str, Any]:
    """Something that takes time on a track of a rank; ``place``: both."""
    times = {"ts": begin, "dur": end - begin, "pid": place[0], "tid": place[1]}
    return {"name": name, "cat": kind, "ph": "X", **times, "args": arguments}


def _tracks(ranks: NDArray[np.int64], start: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.int64]:
    """For every event the lowest track of its rank that is free at its start: a track cannot show two at once."""
    track = np.zeros(len(ranks), dtype=np.int64)
    free: dict[int, list[float]] = {}
    for i in np.lexsort((end, start, ranks)):
        until = free.setdefault(int(ranks[i]), [])
        slack = 1e-9 * float(end[i])
        track[i] = next((k for k, t in enumerate(until) if t <= start[i] + slack), len(until))
        if track[i] == len(until):
            until.append(0.0)
        until[track[i]] = float(end[i])
    return track

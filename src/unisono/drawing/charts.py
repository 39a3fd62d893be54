"""The contents of Gantt charts: the messages of a simulated collective, or the actions of a pipeline."""

from unisono.drawing.colours import chunk_colour
from unisono.drawing.gantt import Bar, Chart, Row, Track
from unisono.drawing.messages import chunk_range
from unisono.errors import UsageError
from unisono.simulation import PipelineTimeline, Slot, Timeline
from unisono.units import show_nbytes, show_seconds

__all__ = ["chart_of", "pipeline_heading"]

_MAX_NODES, _MAX_BARS = 64, 20_000
_KINDS = {
    "F": ("forward", chunk_colour(0, 1)),
    "B": ("input gradient", chunk_colour(5, 7)),
    "W": ("weight gradient", chunk_colour(4, 9)),
    "BW": ("both gradients", chunk_colour(5, 7)),
}
_PER_ACTION, _WIDEST = 20.0, 3000.0  # of the picture of a pipeline


def chart_of(timeline: Timeline | PipelineTimeline, picture: bool) -> Chart:
    """The chart. Raises UsageError for more bars, or in a picture more ranks, than anybody could tell apart."""
    return _messages(timeline, picture) if isinstance(timeline, Timeline) else _actions(timeline)


def _messages(timeline: Timeline, picture: bool) -> Chart:
    """Two tracks per rank, what it sends and what it receives."""
    e, s = timeline.events, timeline.schedule
    nodes, num_chunks = s.world_size + s.switches, s.collective.num_chunks
    if picture and (nodes > _MAX_NODES or len(e) > _MAX_BARS):
        raise UsageError(
            f"{s.name} over {nodes} ranks makes {len(e)} messages, a chart shows up to {_MAX_NODES} ranks and "
            f"{_MAX_BARS} messages: draw fewer ranks, or a trace"
        )
    sends: list[list[Bar]] = [[] for _ in range(nodes)]
    receives: list[list[Bar]] = [[] for _ in range(nodes)]
    for i in range(len(e)):
        first, src, dst = int(e.chunk[i]), int(e.src[i]), int(e.dst[i])
        start, end, chunks = float(e.start[i]), float(e.end[i]), chunk_range(first, int(e.count[i]))
        sign, fill = ("+", "━") if e.reduce[i] else ("=", "╌")
        span = f"{show_seconds(start)} to {show_seconds(end)}"
        title = f"step {e.step[i]}: {src}→{dst} {chunks} {sign}, {show_nbytes(float(e.nbytes[i]))}, {span}"
        for tracks, node, name, opacity in ((sends, src, f"→{dst}", 1.0), (receives, dst, f"←{src}", 0.55)):
            name, colour = f"{name} {chunks} {sign}", chunk_colour(first, num_chunks)
            tracks[node].append(Bar(start, end, colour, title, name, (f"c{first}",), opacity, fill))
    names = [f"rank {n}" if n < s.world_size else f"switch {n}" for n in range(nodes)]
    rows = [Row(name, [Track("→ ", sends[n]), Track("← ", receives[n])]) for n, name in enumerate(names)]
    took = f"{show_nbytes(timeline.nbytes)} over {timeline.topology.name} in {show_seconds(timeline.time)}"
    return Chart(
        f"{s.name} {s.collective.name} · {s.world_size} ranks · {took}",
        rows,
        0.0,
        max(timeline.time, float(e.end.max(initial=0.0))) or 1e-9,
        show_seconds,
        [("", "above: sends, below: receives; + reduced into what is there, = copied over it")],
        "→ sends, ← receives, ━ reduced into what is there, ╌ copied over it",
    )


def _actions(timeline: PipelineTimeline) -> Chart:
    """One track per rank; of several stages on a rank the later ones are paler."""
    slots = [slot for row in timeline.slots for slot in row]
    if len(slots) > _MAX_BARS:
        raise UsageError(f"{len(slots)} actions are too many to draw, {_MAX_BARS} is the most: draw fewer microbatches")
    begin, until = min((s.start for s in slots), default=0.0), max((s.end for s in slots), default=1.0)
    until = until if until > begin else begin + 1.0
    lengths = [s.end - s.start for s in slots if s.end - s.start > (until - begin) / 1000]
    shortest = min(lengths, default=until - begin)
    rows = []
    for rank, row in enumerate(timeline.slots):
        stages = timeline.schedule.stages_of(rank)
        bars = [_action(slot, stages) for slot in row]
        rows.append(Row(f"rank {rank}", [Track(" ", bars)], f"{timeline.bubbles[rank]:.1%} idle"))
    used = {slot.action.kind for slot in slots}
    legend = [(colour, f"{kind} {name}") for kind, (name, colour) in _KINDS.items() if kind in used]
    named = max((len(str(slot.action)) for slot in slots), default=1)
    return Chart(
        pipeline_heading(timeline),
        rows,
        begin,
        until,
        lambda time: f"{time:.6g}",
        [*legend, ("", "numbers are microbatches; paler: the rank's later stages")],
        ", ".join(["stage, kind, microbatch", *(words for _, words in legend), "· idle"]),
        min(max((until - begin) / shortest * _PER_ACTION, 1000.0), _WIDEST),
        round((until - begin) / shortest * (named + 1)),
        "·",
    )


def _action(slot: Slot, stages: tuple[int, ...]) -> Bar:
    action, (what, colour) = slot.action, _KINDS[slot.action.kind]
    title = (
        f"{action}: {what} of stage {action.stage}, microbatch {action.microbatch}, {slot.start:.6g} to {slot.end:.6g}"
    )
    opacity = 1.0 - 0.35 * stages.index(action.stage) / max(len(stages) - 1, 1)
    names = (f"{action}━", action.kind, action.kind[:1])
    return Bar(slot.start, slot.end, colour, title, str(action.microbatch), names, opacity)


def pipeline_heading(timeline: PipelineTimeline) -> str:
    """One line: what the schedule is, and its bubble."""
    s = timeline.schedule
    stages = f"{s.num_stages} stages" + (f" on {s.world_size} ranks" if s.num_stages != s.world_size else "")
    return f"{s.name} · {stages} · {s.num_microbatches} microbatches · bubble {timeline.bubble:.1%}"

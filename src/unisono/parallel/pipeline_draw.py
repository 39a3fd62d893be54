"""A pipeline timeline as a Gantt chart, in text and in SVG: a row per rank, a bar per action, gaps are the bubble.

F, B and W have a colour each (BW that of B); of several stages on a rank the later ones are paler. Never imports torch.
"""

from rich.console import Group
from rich.text import Text

from unisono.draw import Picture
from unisono.draw.colours import chunk_colour
from unisono.draw.svg import document, element, text, ticks
from unisono.errors import UsageError
from unisono.parallel.pipeline_simulate import PipelineTimeline, Slot

__all__ = ["draw_pipeline", "draw_pipeline_svg"]

_COLOURS = {"F": chunk_colour(0, 1), "B": chunk_colour(5, 7), "W": chunk_colour(4, 9), "BW": chunk_colour(5, 7)}
_NAMES = {"F": "forward", "B": "input gradient", "W": "weight gradient", "BW": "both gradients"}
_LEFT, _TOP, _ROW, _BAR, _NARROWEST, _WIDEST = 76.0, 66.0, 34.0, 24.0, 1000.0, 3000.0
_MAX_ACTIONS = 20_000


def draw_pipeline(timeline: PipelineTimeline, columns: int | None = None) -> Picture:
    """Text: `0F2━━` is an action from where it starts to where it ends, `·` is idle.

    `columns` wide without the names of the ranks; None makes room for the name of every action. Where a name does not
    fit, the kind alone is shown.
    """
    _check_size(timeline)
    shortest, begin, until = _scale(timeline)
    named = max((len(str(s.action)) for row in timeline.slots for s in row), default=1)
    if columns is None:
        columns = round((until - begin) / shortest * (named + 1))
    per = columns / (until - begin)
    left = len(f"rank {len(timeline.slots) - 1}") + 2
    lines = []
    for rank, row in enumerate(timeline.slots):
        line, at = Text(f"rank {rank}".ljust(left)), 0
        for slot in row:
            start, end = round((slot.start - begin) * per), round((slot.end - begin) * per)
            line.append("·" * (start - at), "dim")
            kind, name = slot.action.kind, str(slot.action)
            shown = name if len(name) < end - start else kind[: end - start]
            line.append(shown.ljust(end - start, "━"), _COLOURS[kind])
            at = end
        line.append("·" * (columns - at), "dim")
        lines.append(line)
    kinds = [kind for kind in _NAMES if any(s.action.kind == kind for row in timeline.slots for s in row)]
    legend = ", ".join(["stage, kind, microbatch", *(f"{kind} {_NAMES[kind]}" for kind in kinds), "· idle"])
    return Picture(Group(*lines, Text(), Text(legend, "dim")), max(left + columns, len(legend)))


def draw_pipeline_svg(timeline: PipelineTimeline) -> str:
    """SVG, on light and dark pages. Raises UsageError for more than 20,000 actions, which nobody could tell apart."""
    _check_size(timeline)
    shortest, begin, until = _scale(timeline)
    wide = min(max((until - begin) / shortest * 20, _NARROWEST), _WIDEST)
    per = wide / (until - begin)
    bottom = _TOP + len(timeline.slots) * _ROW
    body = [part for tick in ticks(until - begin) for part in _tick(tick, _LEFT + tick * per, bottom)]
    for rank, row in enumerate(timeline.slots):
        y = _TOP + rank * _ROW
        body.append(element("rect", x=_LEFT, y=y + 1, width=wide, height=_ROW - 2, class_="panel"))
        body.append(text(_LEFT - 12, y + _ROW / 2 + 4, f"rank {rank}", "right"))
        stages = timeline.schedule.stages_of(rank)
        for slot in row:
            body += _bar(slot, _LEFT + (slot.start - begin) * per, y, (slot.end - slot.start) * per, stages)
        x = _LEFT + wide + 12
        body.append(text(x, y + _ROW / 2 + 4, f"{timeline.bubbles[rank]:.1%} idle", "soft"))
    return document(_LEFT + wide + 96, bottom + 40, _heading(timeline), [*body, *_legend(timeline, bottom + 22)])


def _tick(at: float, x: float, bottom: float) -> list[str]:
    return [
        element("line", x1=x, y1=_TOP - 6, x2=x, y2=bottom, class_="line"),
        text(x, _TOP - 14, f"{at:.6g}", "name soft"),
    ]


def _check_size(timeline: PipelineTimeline) -> None:
    count = sum(map(len, timeline.slots))
    if count > _MAX_ACTIONS:
        raise UsageError(f"{count} actions are too many to draw, {_MAX_ACTIONS} is the most: draw fewer microbatches")


def _scale(timeline: PipelineTimeline) -> tuple[float, float, float]:
    """The shortest action (of those that take time at all) and the two ends of the time axis."""
    slots = [slot for row in timeline.slots for slot in row]
    begin, until = min((s.start for s in slots), default=0.0), max((s.end for s in slots), default=1.0)
    until = until if until > begin else begin + 1.0
    lengths = [s.end - s.start for s in slots if s.end - s.start > (until - begin) / 1000]
    return min(lengths, default=until - begin), begin, until


def _heading(timeline: PipelineTimeline) -> str:
    s = timeline.schedule
    stages = (
        f"{s.num_stages} stages on {s.world_size} ranks" if s.num_stages != s.world_size else f"{s.num_stages} stages"
    )
    return f"{s.name} · {stages} · {s.num_microbatches} microbatches · bubble {timeline.bubble:.1%}"


def _bar(slot: Slot, x: float, y: float, width: float, stages: tuple[int, ...]) -> list[str]:
    """A bar, paler for the later stages of a rank, with the number of the microbatch where there is room."""
    action = slot.action
    opacity = 1.0 - 0.35 * stages.index(action.stage) / max(len(stages) - 1, 1)
    told = f"{action}: {_NAMES[action.kind]} of stage {action.stage}, microbatch {action.microbatch}, "
    bar = element(
        "rect",
        element("title", f"{told}{slot.start:.6g} to {slot.end:.6g}"),
        x=x,
        y=y + (_ROW - _BAR) / 2,
        width=max(width - 1, 0.6),
        height=_BAR,
        rx=2,
        fill=_COLOURS[action.kind],
        fill_opacity=opacity,
    )
    name = str(action.microbatch)
    if width < 6.6 * len(name) + 4:
        return [bar]
    return [bar, text(x + width / 2, y + _ROW / 2 + 3.5, name, "bar", text_anchor="middle")]


def _legend(timeline: PipelineTimeline, y: float) -> list[str]:
    kinds = [kind for kind in _NAMES if any(s.action.kind == kind for row in timeline.slots for s in row)]
    parts, x = [], _LEFT
    for kind in kinds:
        parts.append(element("rect", x=x, y=y - 9, width=12, height=12, rx=2, fill=_COLOURS[kind]))
        parts.append(text(x + 18, y + 1, f"{kind} {_NAMES[kind]}", "soft"))
        x += 140
    return [*parts, text(x, y + 1, "numbers are microbatches; paler: the rank's later stages", "soft")]

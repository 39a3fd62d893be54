"""A schedule as one self-contained HTML page that plays it: messages on the circle, and what every rank holds.

The page only shows: which rank holds which contributions after each step is worked out here, by schedule.state, and
travels inside the page as JSON.
"""

import json
from html import escape
from typing import Any

import numpy as np

from unisono.drawing.colours import chunk_colour
from unisono.drawing.messages import Message, shown_steps, spans, title
from unisono.drawing.player import BODY, SCRIPT, STYLE
from unisono.errors import UsageError
from unisono.schedule import Schedule
from unisono.schedule.picture import contributions
from unisono.schedule.state import State, states

__all__ = ["draw_html", "html_page"]

_MAX_NODES, _MAX_CELLS, _MAX_CHANGES = 32, 4096, 1_000_000


def draw_html(schedule: Schedule) -> str:
    """The page, UTF-8 text. Raises UsageError if there are too many ranks, chunks or steps to look at."""
    c = schedule.collective
    nodes = schedule.world_size + schedule.switches
    if nodes * c.num_chunks > _MAX_CELLS or nodes * c.num_chunks * schedule.num_steps > _MAX_CHANGES:
        raise UsageError(
            f"{schedule.name} {c.name} with {nodes} ranks, {c.num_chunks} chunks and {schedule.num_steps} steps is too "
            f"large for a page (up to {_MAX_CELLS} chunks on all ranks together): draw it over fewer ranks or chunks"
        )
    data = json.dumps(_data(schedule), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    scripts = f'<script type="application/json" id="data">{data}</script>\n<script>{SCRIPT}</script>'
    return html_page(title(schedule), STYLE, f"<h1>{escape(title(schedule))}</h1>", BODY, scripts)


def html_page(title: str, style: str, *body: str) -> str:
    """A self-contained page, UTF-8 text."""
    return "\n".join(
        [
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>',
            f'<meta name="viewport" content="width=device-width">\n<style>{style}</style>\n</head>\n<body>',
            *body,
            "</body>\n</html>\n",
        ]
    )


def _data(schedule: Schedule) -> dict[str, Any]:
    """The page's data. A cell is [rank, chunk, contributions in words, contributing ranks, those counted twice]."""
    c, (steps, notes) = schedule.collective, shown_steps(schedule, _MAX_NODES, schedule.num_steps, "a page")
    nodes = range(schedule.world_size + schedule.switches)
    every = [(rank, chunk) for rank in nodes for chunk in range(c.num_chunks)]
    before: np.ndarray | None = None
    changes: list[list[list[Any]]] = []
    for state in states(schedule):
        changed = every if before is None else np.argwhere((state.counts != before).any(axis=2)).tolist()
        changes.append([_cell(state, rank, chunk) for rank, chunk in changed])
        before = state.counts.copy()
    return {
        "ranks": c.world_size,
        "switches": schedule.switches,
        "chunks": c.num_chunks,
        "colours": [chunk_colour(chunk, c.num_chunks) for chunk in range(c.num_chunks)],
        "wanted": c.held_before().sum(axis=0).tolist(),
        "goal": c.held_after().astype(int).tolist(),
        "steps": [[_message(m) for m in moved] for moved in steps],
        "changes": changes,
        "notes": notes,
    }


def _message(m: Message) -> dict[str, Any]:
    name = f"c{spans(m.chunks)}"
    return {"src": m.src, "dst": m.dst, "chunks": m.chunks, "name": name, "label": m.label, "reduce": m.reduce}


def _cell(state: State, rank: int, chunk: int) -> list[Any]:
    counts = state.at(rank, chunk)
    return [rank, chunk, contributions(counts), np.flatnonzero(counts).tolist(), np.flatnonzero(counts > 1).tolist()]

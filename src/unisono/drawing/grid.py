"""A schedule as a text grid: what every rank sends and receives in every step.

    ring all_gather · 3 ranks · 3 chunks · 2 steps

    step  rank 0   rank 1   rank 2
    ──────────────────────────────
    0     →1 c0 =  →2 c1 =  →0 c2 =
          ←2 c2 =  ←0 c0 =  ←1 c1 =
    1     →1 c2 =  →2 c0 =  →0 c1 =
          ←2 c1 =  ←0 c2 =  ←1 c0 =

Ranks are columns where they fit, else rows; where neither fits, columns are left out, and a note says which.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from rich.console import Group
from rich.text import Text

from unisono.drawing.colours import chunk_colour
from unisono.drawing.drawing import Cell, Drawing, Sheet, gap_in, shown_of
from unisono.drawing.messages import spans, title
from unisono.schedule import Hosts, Schedule, Step
from unisono.schedule.transform import flatten

__all__ = ["draw_grid"]

_MAX_RANKS, _MAX_LINES, _NARROWEST, _WIDEST = 40, 6, 7, 24
_TAIL = 4


@dataclass(frozen=True, slots=True)
class _Part:
    """One line of a cell: the chunks that a rank sends to, or receives from, peers."""

    sends: bool
    peers: tuple[int, ...]
    everyone: bool
    chunks: tuple[int, ...]
    reduce: bool

    def texts(self, gap: str) -> Iterator[tuple[str, str]]:
        """Peers and chunks in words, longest first: `→1-7` `c0-3 +`, `→all` `c0-3 +`, .. `→7×` `c×4 +`."""
        arrow, sign = "→" if self.sends else "←", gap + ("+" if self.reduce else "=")
        peers, chunks = [spans(self.peers)], [f"c{spans(self.chunks)}"]
        if len(self.peers) > 1:
            peers = ["all"] if self.everyone and len(self.peers) > 2 else [*peers, f"{len(self.peers)}×"]
        if len(self.chunks) > 1:
            chunks.append(f"c×{len(self.chunks)}")
        return ((f"{arrow}{p} ", c + sign) for c in chunks for p in peers)

    def fitted(self, width: int, gap: str, num_chunks: int) -> Text:
        """The first words that fit, the chunks in their colour."""
        texts = list(self.texts(gap))
        peers, chunks = next((t for t in texts if len(t[0]) + len(t[1]) <= width), texts[-1])
        return Text.assemble(peers, (chunks, chunk_colour(self.chunks[0], num_chunks)))


@dataclass(frozen=True)
class _Content:
    """The cells of a drawing before they are put into words: a row per step, a column per rank."""

    schedule: Schedule
    steps: list[int]
    ranks: list[int]
    parts: list[list[list[_Part]]]
    hosts: Mapping[int, int]

    def sheet(self, width: int, squeezed: bool, ranks_as_rows: bool) -> Sheet:
        """The cells in words, none wider than an even share of `width` allows."""
        across = len(self.steps if ranks_as_rows else self.ranks)
        gap = 1 if squeezed else 2
        share = (width - len("switch 9" if ranks_as_rows else "step")) // max(across, 1) - gap
        limit = min(max(share, _NARROWEST), _WIDEST)
        cells = [[self._words(parts, limit, "" if squeezed else " ") for parts in row] for row in self.parts]
        ranks = [self._name(r, squeezed and not ranks_as_rows) for r in self.ranks]
        breaks = gap_in(self.steps), gap_in(sorted(self.ranks))
        if not ranks_as_rows:
            return Sheet("step", ranks, [str(i) for i in self.steps], cells, gap).broken(*breaks)
        turned = [[row[i] for row in cells] for i in range(len(self.ranks))]
        return Sheet("", [f"step {i}" for i in self.steps], ranks, turned, gap).broken(*reversed(breaks))

    def _name(self, rank: int, short: bool) -> str:
        is_rank = rank < self.schedule.world_size
        if rank in self.hosts:
            return f"h{self.hosts[rank]} r{rank}"
        return f"{('r' if short else 'rank ') if is_rank else ('sw' if short else 'switch ')}{rank}"

    def _words(self, parts: list[_Part], limit: int, gap: str) -> Cell:
        if not parts:
            return [Text("·", "dim")]
        kept = parts if len(parts) <= _MAX_LINES else parts[: _MAX_LINES - 1]
        lines = [part.fitted(limit, gap, self.schedule.collective.num_chunks) for part in kept]
        return lines if kept is parts else [*lines, Text(f"…{len(parts) - len(kept)} more", "dim")]


def draw_grid(schedule: Schedule, width: int, max_steps: int, hosts: Hosts = ()) -> Drawing:
    """The grid of a schedule, at most `width` characters wide where that holds two ranks, of `max_steps` steps.

    With hosts, ranks are named by host and rank, `h0 r2`, and the ranks of a host are neighbours.
    """
    steps, nodes = flatten(schedule.steps), schedule.world_size + schedule.switches
    shown, ranks = shown_of(len(steps), max_steps, _TAIL), shown_of(nodes, _MAX_RANKS, 1)
    of = {rank: host for host, members in enumerate(hosts) for rank in members}
    ranks.sort(key=lambda rank: (of.get(rank, nodes), rank))
    parts = [[_parts(step, r, nodes) for r in ranks] for step in (_touching(steps[i], ranks) for i in shown)]
    sheet, ranks = _fit(_Content(schedule, shown, ranks, parts, of), width)
    notes = [_gap_note("steps", shown), _gap_note("ranks", sorted(ranks))]
    lines = [*_legend(parts), *(Text(note, "italic") for note in notes if note)]
    return Drawing(
        "text", Group(Text(title(schedule), "bold"), Text(), sheet.table(), Text(), *lines), max(width, sheet.width)
    )


def _gap_note(what: str, shown: list[int]) -> str:
    """Which numbers are left out, in words."""
    after = gap_in(shown)
    return "" if after is None else f"{what} {after} to {shown[after] - 1} not shown"


def _touching(step: Step, ranks: list[int]) -> Step:
    """The transfers that some of these ranks send or receive."""
    near = np.isin(step.src, ranks) | np.isin(step.dst, ranks)
    return Step.make(step.src[near], step.dst[near], step.chunk[near], step.count[near], step.reduce[near])


def _parts(step: Step, rank: int, nodes: int) -> list[_Part]:
    """The sends of a rank, then its receives: chunks to one peer, then peers with the same chunks, are gathered."""
    parts: list[_Part] = []
    for sends, mine, others in ((True, step.src, step.dst), (False, step.dst, step.src)):
        by_peer: dict[tuple[int, bool], set[int]] = {}
        for t in np.flatnonzero((mine == rank) & (step.count > 0)):
            chunks = range(int(step.chunk[t]), int(step.chunk[t]) + int(step.count[t]))
            by_peer.setdefault((int(others[t]), bool(step.reduce[t])), set()).update(chunks)
        peers_of: dict[tuple[tuple[int, ...], bool], list[int]] = {}
        for (peer, reduce), found in by_peer.items():
            peers_of.setdefault((tuple(sorted(found)), reduce), []).append(peer)
        for (moved, reduce), peers in peers_of.items():
            parts.append(_Part(sends, tuple(sorted(peers)), len(peers) == nodes - 1, moved, reduce))
    return parts


def _fit(content: _Content, width: int) -> tuple[Sheet, list[int]]:
    """The first that fits: ranks as columns, roomy or squeezed; ranks as rows; as many columns as there is room for."""
    for ranks_as_rows in (False, True):
        for squeezed in (False, True):
            sheet = content.sheet(width, squeezed, ranks_as_rows)
            if sheet.width <= width:
                return sheet, content.ranks
    whole = content.sheet(width, squeezed=True, ranks_as_rows=False)
    room = width - whole.widths[0] - whole.widths[-1] - 1 - 2 * whole.gap
    taken = np.cumsum(np.array(whole.widths[1:-1]) + whole.gap)
    kept = max(1, int(np.searchsorted(taken, room, side="right")))
    cells = [[*row[:kept], row[-1]] for row in whole.cells]
    cut = Sheet(whole.corner, [*whole.columns[:kept], whole.columns[-1]], whole.rows, cells, whole.gap)
    return cut.broken(None, kept), [*content.ranks[:kept], content.ranks[-1]]


def _legend(parts: list[list[list[_Part]]]) -> list[Text]:
    """The signs, as far as they occur."""
    found = [part for row in parts for cell in row for part in cell]
    signs = {
        "+": "reduced into what is there" if any(p.reduce for p in found) else "",
        "=": "copied over it" if any(not p.reduce for p in found) else "",
    }
    words = [f"{sign} {meaning}" for sign, meaning in signs.items() if meaning]
    return [Text(", ".join(["→ sends", "← receives", *words]), "dim")] if found else []

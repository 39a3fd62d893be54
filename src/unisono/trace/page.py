"""The report: one self-contained HTML page. Never imports torch."""

from collections.abc import Sequence
from html import escape

from unisono.drawing.html import html_page
from unisono.trace.summary import CallSum, RankSum, Summary
from unisono.units import show_nbytes, show_ranks, show_seconds

__all__ = ["report_page"]

_STYLE = """
:root { --ink: #1b2430; --dim: #667080; --line: #e3e7ec; --compute: #dfe4ea; --overlap: #7fb59b; --work: #2f6fc4;
  --wait: #e08a3c; --reduce: #8a5cc2; --bad: #c2410c; --paper: #fff; --faint: #f3f5f7; color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e7ec; --dim: #9aa5b3; --line: #333c47; --compute: #3a444f; --bad: #f08a5d; --paper: #10151b;
    --faint: #232a32; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 36px 28px 60px; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 22px; margin: 0 0 2px; } h2 { font-size: 16px; margin: 40px 0 4px; }
p { margin: 4px 0 12px; overflow-wrap: anywhere; } .dim { color: var(--dim); }
code { font: 13px ui-monospace, "DejaVu Sans Mono", monospace; }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 14px; margin: 24px 0 0; }
.tile { border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px; }
.tile b { display: block; font-size: 26px; line-height: 1.25; font-weight: 600; }
.tile span { color: var(--dim); font-size: 13px; }
.missing { color: var(--bad); } .bad b { color: var(--bad); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--dim); font-size: 13px; border-bottom: 1px solid var(--line); }
th, td { padding: 6px 14px 6px 0; vertical-align: middle; } td.n, th.n { text-align: right; white-space: nowrap; }
tr + tr td { border-top: 1px solid var(--faint); } td:last-child, th:last-child { padding-right: 0; }
.bar { display: flex; height: 16px; border-radius: 3px; overflow: hidden; background: var(--compute); }
.bar i { display: block; height: 100%; } .thin .bar { height: 10px; min-width: 110px; }
.clear .bar { background: var(--faint); }
.compute { background: var(--compute); } .overlap { background: var(--overlap); } .work { background: var(--work); }
.wait { background: var(--wait); } .reduce { background: var(--reduce); }
.legend { display: flex; gap: 4px 20px; flex-wrap: wrap; font-size: 13px; color: var(--dim); margin: 2px 0 12px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.call { min-width: 200px; max-width: 430px; overflow-wrap: anywhere; }
.call small { display: block; color: var(--dim); }
.wide { width: 55%; } .rank { width: 52px; } .scroll { overflow-x: auto; }
@media (max-width: 700px) {
  body { padding: 20px 16px 40px; } .tiles { grid-template-columns: repeat(2, 1fr); }
  th, td { padding-right: 10px; } .scroll { padding-bottom: 10px; }
}
"""


def report_page(summary: Summary, trace: str, rates: str) -> str:
    """The page, UTF-8 text. ``trace`` is the trace's file name; ``rates`` tells the machine's pace, or is empty."""
    took = f"{show_seconds(summary.seconds)} {summary.span}"
    ranks = _legend(
        ("work", "moving and reducing, exposed"),
        ("wait", "waiting for other ranks, exposed"),
        ("overlap", "communicating while computing"),
        ("compute", "the rest: nothing under way"),
    )
    return html_page(
        f"unisono trace: {summary.program}",
        _STYLE,
        "<h1>Where the time goes</h1>",
        f'<p class="dim"><code>{escape(summary.program)}</code> · {show_ranks(len(summary.ranks))} · {took}</p>',
        *([f'<p class="missing">{escape(summary.absence)}</p>'] if summary.missing else []),
        _tiles(summary),
        f"<h2>Ranks</h2>\n{ranks}\n{_ranks(summary)}",
        f"{_skew(summary)}<h2>Calls that take longest</h2>",
        _legend(("wait", "wait"), ("work", "move"), ("reduce", "reduce")),
        _calls(summary),
        _devices(summary),
        f'<p class="dim">{_notes(summary, rates)}</p>',
        f'<p class="dim">Every single call: open <code>{escape(trace)}</code> at https://ui.perfetto.dev.</p>',
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def _tiles(summary: Summary) -> str:
    hidden = summary.share - summary.exposed
    slow = next((rank for rank in summary.ranks if rank.rank == summary.slowest), None)
    tiles = [
        ("", _percent(summary.share), "of the time communicating"),
        ("", _percent(summary.exposed), "exposed: ranks do nothing else"),
        ("", _percent(hidden), "overlapped with compute"),
    ]
    if slow is not None:
        kind, margin = ("bad", " on average") if summary.clearly else ("", ", not by much")
        tiles.append((kind, f"rank {slow.rank}", f"slowest: {show_seconds(slow.late)} behind{margin}"))
    cells = "".join(f'<div class="tile {kind}"><b>{value}</b><span>{text}</span></div>' for kind, value, text in tiles)
    return f'<div class="tiles">{cells}</div>'


def _legend(*entries: tuple[str, str]) -> str:
    return f'<div class="legend">{"".join(f"<span><i class={kind}></i>{text}</span>" for kind, text in entries)}</div>'


def _bar(*parts: tuple[str, float]) -> str:
    pieces = "".join(f'<i class="{kind}" style="width:{100 * share:.2f}%"></i>' for kind, share in parts if share > 0)
    return f'<div class="bar">{pieces}</div>'


def _table(head: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], style: str = "") -> str:
    columns = "".join(f'<th class="{kind}">{name}</th>' for name, kind in head)
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for cell, (_, kind) in zip(row, head, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table class="{style}"><tr>{columns}</tr>{body}</table></div>'


def _ranks(summary: Summary) -> str:
    def row(rank: RankSum) -> list[str]:
        whole = summary.seconds or 1.0
        parts = (
            ("work", (rank.exposed - rank.waiting) / whole),
            ("wait", rank.waiting / whole),
            ("overlap", rank.overlapped / whole),
        )
        shares = [rank.exposed / whole, rank.waiting / whole, rank.overlapped / whole]
        numbers = [*map(_percent, shares), f"{rank.calls:,}", show_nbytes(rank.nbytes)]
        return [str(rank.rank), _bar(*parts), *numbers]

    head = [("rank", "rank"), ("", "wide"), ("exposed", "n"), ("waiting", "n"), ("overlapped", "n"), ("calls", "n")]
    return _table([*head, ("bytes", "n")], [row(rank) for rank in summary.ranks])


def _skew(summary: Summary) -> str:
    if summary.slowest is None:
        return ""
    most = max((rank.late for rank in summary.ranks), default=0.0) or 1.0
    rows = [
        [str(rank.rank), _bar(("wait", rank.late / most)), show_seconds(rank.late), _percent(rank.last)]
        for rank in summary.ranks
        if rank.compared
    ]
    table = _table([("rank", "rank"), ("", "wide"), ("behind", "n"), ("last to come", "n")], rows, "clear")
    return f"""<h2>Who is late</h2>
<p class="dim">How long after the first rank of its group each rank issues a collective, on average, and how often it is
the last to come: the others wait for it.</p>
{table}
"""


def _calls(summary: Summary) -> str:
    def row(kind: CallSum) -> list[str]:
        share = kind.seconds / summary.seconds if summary.seconds else 0.0
        return [
            f"<code>{escape(kind.words)}</code><small>{escape(_short(kind.site))}</small>",
            f"{kind.count:,}",
            show_nbytes(kind.nbytes),
            show_seconds(kind.mean),
            show_seconds(kind.seconds),
            _percent(share),
            _bar(("wait", kind.wait), ("work", kind.move), ("reduce", kind.reduce)),
            _percent(kind.bound) if kind.bound else "",
        ]

    head = [("call", "call"), ("calls", "n"), ("size", "n"), ("each", "n"), ("in all", "n"), ("of the time", "n")]
    return _table([*head, ("", ""), ("of the bound", "n")], [row(kind) for kind in summary.top], "thin")


def _devices(summary: Summary) -> str:
    if not summary.device:
        return ""
    head = [("call", "call"), ("by", ""), ("calls", "n"), ("bytes in all", "n"), ("host, each", "n")]
    rows = [
        [escape(kind.op), kind.way, f"{kind.count:,}", show_nbytes(kind.nbytes), show_seconds(kind.host)]
        for kind in summary.device
    ]
    return f"""<h2>Calls on GPUs</h2>
<p class="dim">Of a rank, on average. The host's time is what a call takes until the host goes
on; the GPU is done later.</p>
{_table(head, rows)}
"""


def _short(site: str) -> str:
    """A place with the last folder of its path."""
    file, colon, rest = site.partition(":")
    return "/".join(file.split("/")[-2:]) + colon + rest


def _notes(summary: Summary, rates: str) -> str:
    notes = []
    if summary.kinds > len(summary.top):
        notes.append(f"These are {len(summary.top)} of {summary.kinds} kinds of calls.")
    notes.append(
        "A call's time runs from its issue to its end; with several under way at once the sums can exceed the time."
    )
    notes.append(
        "Exposed is the time in which the main thread is inside a call or a wait, or stands still while a call is "
        "under way; overlapped the time in which it computes, or is ready to, while a call is under way."
    )
    if rates:
        notes.append(
            "Of the bound: the least time in which the bytes can be read and written, as a share of what a call takes "
            f"beyond waiting; this machine {rates}."
        )
    return escape(" ".join(notes))

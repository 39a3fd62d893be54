"""Draws the pictures of docs/internals.md: `python docs/img/internals.py` writes them beside this file.

Sizes and places in the map are those of the layout itself. tests/docs/test_internals.py holds that the files are
what this draws.
"""

from pathlib import Path

from unisono.drawing.svg import arrow_head, document, element, text
from unisono.transport.layout import Layout
from unisono.units import show_nbytes

BLUE, GREEN, AMBER, RED, GREY = "#2f7fd6", "#1a9a5c", "#c77c02", "#d1453b", "#7d8590"
RANKS = 4  # in the map
MONO = "font-family: ui-monospace, 'DejaVu Sans Mono', monospace"


def box(x: float, y: float, width: float, height: float, colour: str, *lines: str) -> list[str]:
    """A box with a bold first line and soft lines below it, centred."""
    parts = [
        element("rect", x=x, y=y, width=width, height=height, rx=6, class_="panel"),
        element("rect", x=x, y=y, width=width, height=height, rx=6, fill=colour, fill_opacity=0.14, stroke=colour),
    ]
    top = y + height / 2 - 7.5 * (len(lines) - 1) + 4
    for k, line in enumerate(lines):
        parts.append(text(x + width / 2, top + 15 * k, line, "soft" if k else "head", text_anchor="middle"))
    return parts


def arrow(points: list[complex], colour: str = GREY, dash: str | None = None) -> list[str]:
    """A line through points (x + y·j) that ends in an arrow head."""
    path = "M" + "L".join(f"{p.real:g} {p.imag:g}" for p in points)
    along, tip = points[-1] - points[-2], points[-1]
    line = element("path", d=path, fill="none", stroke=colour, stroke_width=1.5, stroke_dasharray=dash)
    return [line, arrow_head(tip, along, colour, 8.0)]


def note(x: float, y: float, *lines: str, anchor: str = "start") -> list[str]:
    """Soft lines of text, one below the other."""
    return [text(x, y + 14 * k, line, "soft", text_anchor=anchor) for k, line in enumerate(lines)]


def segment() -> str:
    """The map of the memory that a group shares."""
    layout, n = Layout(RANKS), RANKS
    rows = [
        ("identity", 0, "1", 40, GREY, "rank 0, once", "magic number, world size, layout version, nonce"),
        ("records", layout.records, f"{n}", layout.RECORD, BLUE, "its rank", "process, state, calls issued, completed"),
        ("texts", layout.texts, f"{layout.TEXTS // layout.TEXT} × {n}", layout.TEXT, BLUE, "its rank",
         "call, exit note, failed message, who survives"),
        ("outboxes", layout.outboxes, f"{n}", layout.OUTBOX, BLUE, "its rank", "what it has staged for other hosts"),
        ("counters", layout.counters, "2", layout.COUNTER_LINES, AMBER, "all, atomically",
         "arrivals at even and odd meetings; tiny data"),
        ("bells", layout.bells, f"{n}", 64, AMBER, "all, atomically", "wake a rank that waits for messages"),
        ("headers", layout.headers, f"2 × {n}", layout.header, BLUE, "its rank", "what the call is: op, dtype, shape"),
        ("handles", layout.handles, f"2 × {n}", 64, BLUE, "its rank", "where its tensor lies, if peers may read it"),
        ("ring controls", layout.ring_controls, f"{n} × {n}", layout.RING_CONTROL, GREEN, "both ends", "bytes in, out"),
        ("rings", layout.rings, f"{n} × {n}", layout.ring, GREEN, "the sender", "send and recv: heads and payloads"),
        ("staging", layout.stages, f"2 × {n}", layout.area, BLUE, "its rank *", "data of collectives"),
        ("GPU headers", layout.device_headers, f"{layout.DEVICE_CALLS} × {n}", layout.header, BLUE, "its rank",
         "its last calls on GPUs"),
    ]  # fmt: skip
    columns = (16, 104, 236, 292, 360, 468)
    heads = ("offset", "region", "entries", "each", "written by", "what it holds")
    parts = [text(x, 58, head, "soft") for x, head in zip(columns, heads, strict=True)]
    for k, (name, at, entries, each, colour, writer, what) in enumerate(rows):
        y = 68 + 34 * k
        parts += box(columns[1], y, 120, 28, colour, name)
        parts.append(text(columns[0], y + 18, f"{at:#x}", style=MONO))
        words = zip(columns[2:], (entries, show_nbytes(each), writer, what), strict=True)
        parts += [text(x, y + 18, word) for x, word in words]
    end = 68 + 34 * len(rows)
    parts.append(text(columns[0], end + 12, f"{layout.total:#x}", style=MONO))
    notes = [
        f"Sizes for {n} ranks; pages exist once touched. 2 × {n}: an entry per rank for even and one for odd meetings.",
        "* Placement mailbox: a rank also writes sums back into its peers' staging memory, between two meetings.",
    ]
    return document(760, end + 68, f"The memory that {n} ranks of a group share", parts, notes)


def _lane(y: float, rank: int, spans: list[tuple[float, float, str, str]]) -> list[str]:
    """One rank over time: spans from x to x, in a colour, with a word."""
    parts = [text(16, y + 17, f"rank {rank}", "head")]
    for start, end, colour, word in spans:
        parts += box(start, y, end - start - 2, 26, colour)
        parts.append(text((start + end) / 2, y + 17, word, text_anchor="middle"))
    return parts


def meeting() -> str:
    """A 4-byte all_reduce of three ranks, rank 1 late: one meeting."""
    write, read = "write header, data", "compare headers, sum"
    spans = [
        [
            (76, 206, BLUE, write),
            (210, 258, AMBER, "poll"),
            (258, 306, AMBER, "yield"),
            (306, 486, GREY, "sleep (futex)"),
        ],
        [(330, 460, BLUE, write)],
        [(150, 280, BLUE, write), (284, 332, AMBER, "poll"), (332, 380, AMBER, "yield"), (380, 486, GREY, "sleep")],
    ]
    tops, done, parts = (70, 140, 210), (494, 466, 494), []
    for x, y, count in ((208, 70, 1), (282, 210, 2), (462, 140, 3)):
        parts.append(element("line", x1=x, y1=y - 6, x2=x, y2=262, stroke=AMBER, stroke_dasharray="3 3"))
        parts.append(text(x, 276, f"{count}", "head", text_anchor="middle"))
    for rank, (y, line) in enumerate(zip(tops, spans, strict=True)):
        parts += _lane(y, rank, [*line, (done[rank], done[rank] + 150, GREEN, read)])
    parts += [text(16, 276, "counter", "head")]
    parts += arrow([464 + 166j, 490 + 200j], RED) + arrow([464 + 138j, 490 + 104j], RED)
    parts += note(500, 124, "the last rank to arrive wakes the sleepers")
    parts += arrow([76 + 300j, 700 + 300j]) + note(704, 304, "time")
    parts += note(
        16,
        326,
        "Meeting k uses counter k mod 4, headers and staging memory of parity k mod 2. A rank that has arrived at",
        "meeting k + 1 has read all of meeting k: once meeting k + 1 is complete, parity k mod 2 is written again.",
        "On its way to meeting k rank 0 sets the counter of meeting k - 2 to 0.",
    )
    return document(760, 382, "One meeting: a 4-byte all_reduce of 3 ranks", parts)


def call_states() -> str:
    """The states of a collective call on one rank."""
    parts = box(40, 60, 150, 44, BLUE, "issued", "number, time noted")
    parts += box(40, 160, 150, 44, GREY, "queued", "earlier calls under way")
    parts += box(290, 60, 170, 44, BLUE, "running", "copies, sums, by rows")
    parts += box(
        290, 180, 170, 58, AMBER, "waiting at a meeting", "poll, yield 1 ms, sleep;", "looks around every 50 ms"
    )
    parts += box(560, 60, 184, 44, GREEN, "completed", "result in the output")
    parts += box(560, 150, 184, 58, AMBER, "mismatch", "MismatchError on all ranks;", "the group can be used")
    parts += box(
        560,
        248,
        184,
        86,
        RED,
        "failed",
        "PeerLostError, DeadlockError,",
        "CollectiveTimeout, or",
        "interrupted (Ctrl-C): this rank",
        "gives the group up",
    )
    parts += arrow([190 + 82j, 290 + 82j]) + note(240, 74, "queue free", anchor="middle")
    parts += arrow([115 + 104j, 115 + 160j]) + note(122, 136, "queue busy, or left", "to the worker thread")
    parts += arrow([190 + 182j, 240 + 182j, 240 + 96j, 290 + 96j])
    parts += note(234, 200, "its turn", anchor="end")
    parts += arrow([340 + 104j, 340 + 180j]) + note(334, 140, "a peer has", "not come", anchor="end")
    parts += arrow([410 + 180j, 410 + 104j]) + note(416, 140, "all have", "come")
    parts += arrow([460 + 74j, 560 + 74j]) + note(510, 66, "last row", anchor="middle")
    parts += arrow([460 + 94j, 520 + 94j, 520 + 176j, 560 + 176j])
    parts += note(526, 122, "headers differ, after", "the first meeting")
    parts += arrow([460 + 216j, 500 + 216j, 500 + 290j, 560 + 290j])
    parts += note(492, 262, "a peer is gone, a deadlock,", "or the time is over", anchor="end")
    parts += note(
        40,
        276,
        "An asynchronous call is carried forward",
        "by wait, is_completed, later calls of the",
        "group, or the worker thread.",
    )
    return document(760, 350, "States of a collective call", parts)


def rank_states() -> str:
    """The states of a rank in a group, as its peers see them."""
    parts = box(30, 90, 150, 44, GREY, "absent", "has not joined")
    parts += box(
        290, 70, 190, 84, BLUE, "joined", "unisono ps shows: in a call,", "waiting, outside unisono,", "or stopped"
    )
    parts += box(580, 90, 150, 44, GREEN, "left", "exit note: why")
    parts += box(290, 220, 190, 58, AMBER, "given up", "lives; makes no more calls here;", "exit note: the error")
    parts += box(580, 230, 150, 58, RED, "dead", "seen in /proc; killed by", "which signal, if any")
    parts += arrow([180 + 112j, 290 + 112j]) + note(235, 90, "maps the memory,", "writes its record", anchor="middle")
    parts += arrow([480 + 112j, 580 + 112j]) + note(530, 90, "destroy_", "process_group", anchor="middle")
    parts += arrow([385 + 154j, 385 + 220j]) + note(392, 182, "a call fails,", "or is interrupted")
    parts += arrow([480 + 240j, 530 + 240j, 530 + 124j, 580 + 124j])
    parts += arrow([480 + 262j, 580 + 262j], RED, "4 3") + arrow([460 + 154j, 580 + 232j], RED, "4 3")
    parts += arrow([105 + 90j, 105 + 56j, 655 + 56j, 655 + 90j]) + note(
        380, 50, "leaves before its first call", anchor="middle"
    )
    parts += arrow([105 + 134j, 105 + 310j, 655 + 310j, 655 + 288j], RED, "4 3")
    parts += note(380, 326, "the process ends: nobody writes this, peers see it", anchor="middle")
    notes = [
        "Solid: the rank writes the new state into its record.",
        "Dashed: nobody writes it; a peer that waits asks the kernel about every 50 ms.",
    ]
    return document(760, 396, "States of a rank in a group, as its peers see them", parts, notes)


PICTURES = {"segment": segment, "meeting": meeting, "call_states": call_states, "rank_states": rank_states}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(__file__).with_name(f"{name}.svg").write_text(draw(), encoding="utf-8")

"""The text form and JSON of schedules; both round-trip exactly.

    schedule ring all_reduce ranks=3 chunks=3
    step 0: 0>1 c2 +, 1>2 c0 +, 2>0 c1 +
    step 1: ...

`0>1 c2 +` sends chunk 2 from rank 0 to rank 1, reduced into (`+`) or copied over (`=`) what is there;
`c4-7` is a range. The header also takes root=R and switches=S. Blank lines and text after `#` are ignored. Compact
steps are written out. The chunks of a redistribution have a line each before the steps: `chunk 0: 0>4,5 1048576` goes
from rank 0 to ranks 4 and 5 and has so many bytes.
"""

import json
import re
from collections.abc import Sequence
from operator import index
from typing import Any

from unisono.errors import UsageError
from unisono.schedule.collectives import Collective, Redistribution
from unisono.schedule.model import Schedule, Step, Transfer
from unisono.schedule.pipeline import PipelineSchedule, numbered_lines

__all__ = ["from_json", "from_text", "read_schedule", "to_json", "to_text"]

_TRANSFER = re.compile(r"(-?\d+)\s*>\s*(-?\d+)\s+c(-?\d+)(?:-(\d+))?\s*([+=])")
_STEP = re.compile(r"step\s+(\d+)\s*:\s*(.*)")
_CHUNK = re.compile(r"chunk\s+(\d+)\s*:\s*(\d+)\s*>\s*(\d+(?:\s*,\s*\d+)*)\s+(\d+)")
_NUMBERS = {"ranks", "chunks", "root", "switches"}


def read_schedule(content: str) -> Schedule | PipelineSchedule:
    """The schedule, of a collective or of a pipeline, in a text form or in JSON.

    Raises UsageError naming what cannot be read.
    """
    text = content.lstrip()
    try:
        if text.startswith("{"):
            data = json.loads(text)
            return PipelineSchedule.from_json(data) if "pipeline" in data else from_json(data)
        return PipelineSchedule.from_text(content) if text.startswith("pipeline") else from_text(content)
    except UsageError:
        raise
    except (ValueError, OverflowError) as problem:
        raise UsageError(f"cannot be read as a schedule: {problem}") from None


def to_text(schedule: Schedule) -> str:
    """A header, then one line per explicit step."""
    c = schedule.collective
    head = f"schedule {schedule.name} {c.name} ranks={c.world_size} chunks={c.num_chunks}"
    head += f" root={c.root}" if c.rooted else ""
    head += f" switches={schedule.switches}" if schedule.switches else ""
    chunks = [f"chunk {i}: {a}>{','.join(map(str, b))} {n}" for i, (a, b, n) in enumerate(_table(c))]
    lines = [f"step {i}: {', '.join(map(str, step))}".rstrip() for i, step in enumerate(schedule.explicit_steps())]
    return "\n".join([head, *chunks, *lines]) + "\n"


def _table(collective: Collective) -> list[tuple[int, tuple[int, ...], int]]:
    """Source, targets and bytes of every chunk of a redistribution."""
    if not isinstance(collective, Redistribution):
        return []
    return list(zip(collective.sources, collective.targets, collective.nbytes, strict=True))


def from_text(text: str) -> Schedule:
    """The schedule a text form describes. Raises UsageError naming the line that cannot be read."""
    lines = numbered_lines(text)
    if not lines:
        raise UsageError("empty schedule: expected 'schedule NAME COLLECTIVE ranks=N chunks=C', then 'step 0: ...'")
    listed = [(i, line) for i, line in lines[1:] if line.startswith("chunk")]
    name, collective, switches = _header(*lines[0], [_chunk(i, line, k) for k, (i, line) in enumerate(listed)])
    steps = tuple(_step(i, line, expected) for expected, (i, line) in enumerate(lines[1 + len(listed) :]))
    return Schedule(name, collective, steps, switches)


_Chunks = Sequence[tuple[int, Sequence[int], int]]


def _collective(name: str, ranks: int, chunks: int, root: int, listed: _Chunks) -> Collective:
    """The collective of a name; a redistribution has its chunks listed, as many as it says."""
    if name == "redistribution" and not root and len(listed) == chunks:
        columns = list(zip(*listed, strict=True)) or [(), (), ()]
        return Redistribution(ranks, *columns)
    if name == "redistribution" or listed:
        raise UsageError(
            f"a redistribution, and nothing else, lists its chunks: {name} of {chunks} lists {len(listed)}"
        )
    return Collective(name, ranks, chunks, root)


def _chunk(number: int, line: str, expected: int) -> tuple[int, list[int], int]:
    match = _CHUNK.fullmatch(line)
    if match is None or int(match[1]) != expected:
        raise UsageError(f"line {number}: expected 'chunk {expected}: SOURCE>TARGETS NBYTES', got {line!r}")
    return int(match[2]), [int(rank) for rank in match[3].split(",")], int(match[4])


def _header(number: int, line: str, listed: _Chunks) -> tuple[str, Collective, int]:
    words = line.split()
    pairs = [word.split("=", 1) for word in words[3:]]
    known = all(len(p) == 2 and p[0] in _NUMBERS and re.fullmatch(r"-?\d+", p[1]) for p in pairs)
    values = {p[0]: int(p[1]) for p in pairs} if known else {}
    if words[0] != "schedule" or len(values) != len(pairs) or not {"ranks", "chunks"} <= values.keys():
        raise UsageError(
            f"line {number}: expected 'schedule NAME COLLECTIVE ranks=N chunks=C [root=R] [switches=S]', got {line!r}"
        )
    collective = _collective(words[2], values["ranks"], values["chunks"], values.get("root", 0), listed)
    return words[1], collective, values.get("switches", 0)


def _step(number: int, line: str, expected: int) -> Step:
    match = _STEP.fullmatch(line)
    if match is None or int(match[1]) != expected:
        raise UsageError(f"line {number}: expected 'step {expected}: ...', got {line!r}")
    return Step.of(*(_transfer(number, part.strip()) for part in match[2].split(",") if match[2]))


def _transfer(number: int, text: str) -> Transfer:
    match = _TRANSFER.fullmatch(text)
    if match is None:
        raise UsageError(f"line {number}: expected a transfer such as '0>1 c2 +' or '0>1 c4-7 =', got {text!r}")
    first = int(match[3])
    count = int(match[4]) - first + 1 if match[4] else 1
    return Transfer(int(match[1]), int(match[2]), first, count, match[5] == "+")


def to_json(schedule: Schedule) -> dict[str, Any]:
    """Plain dictionaries and lists; a transfer is [src, dst, chunk, count, reduce]."""
    c = schedule.collective
    table = {"table": _table(c)} if isinstance(c, Redistribution) else {}
    return table | {
        "schedule": schedule.name,
        "collective": c.name,
        "ranks": c.world_size,
        "chunks": c.num_chunks,
        "root": c.root,
        "switches": schedule.switches,
        "steps": [[[t.src, t.dst, t.chunk, t.count, t.reduce] for t in step] for step in schedule.explicit_steps()],
    }


def from_json(data: dict[str, Any]) -> Schedule:
    """The schedule that to_json described. Raises UsageError if a field is missing or wrong."""
    try:
        optional = {"root": 0, "switches": 0}
        numbers = (index((optional | data)[field]) for field in ("ranks", "chunks", "root", "switches"))
        ranks, chunks, root, switches = numbers
        collective = _collective(data["collective"], ranks, chunks, root, data.get("table", ()))
        steps = tuple(Step.of(*map(_from_list, step)) for step in data["steps"])
        return Schedule(data["schedule"], collective, steps, switches)
    except (KeyError, TypeError) as problem:
        raise UsageError(
            f"not a schedule in JSON ({problem}): expected the fields schedule, collective, ranks, chunks, steps"
        ) from None


def _from_list(values: list[int]) -> Transfer:
    if len(values) != 5:
        raise TypeError(f"{values} is not [src, dst, chunk, count, reduce]")
    src, dst, chunk, count, reduce = map(index, values)
    return Transfer(src, dst, chunk, count, bool(reduce))

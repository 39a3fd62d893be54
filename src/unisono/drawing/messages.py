"""A step in every drawing: its transfers gathered into messages, and short names for chunks and peers."""

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.errors import UsageError
from unisono.schedule import Schedule, Step
from unisono.schedule.transform import flatten
from unisono.units import show_count, show_spans

__all__ = ["MOST_NODES", "MOST_STEPS", "Message", "chunk_range", "messages", "shown_steps", "spans", "title"]

MOST_NODES, MOST_STEPS = 64, 64
"""Of a picture."""
_LONG = 8


@dataclass(frozen=True, slots=True)
class Message:
    """All chunks that go from src to dst in one step and are reduced (or copied) there, in ascending order."""

    src: int
    dst: int
    chunks: tuple[int, ...]
    reduce: bool

    @property
    def label(self) -> str:
        """The chunks, e.g. `c0-3,6`, or their number, e.g. `c×16`, if that would be long."""
        whole = f"c{spans(self.chunks)}"
        return whole if len(whole) <= _LONG else f"c×{len(self.chunks)}"

    def __str__(self) -> str:
        return f"{self.src}→{self.dst} c{spans(self.chunks)} {'reduced into' if self.reduce else 'copied over'}"


def messages(schedule: Schedule, step: Step) -> tuple[list[Message], int]:
    """The messages of a plain step, in the order of its transfers, and how many transfers cannot be drawn.

    The latter name a rank or a chunk that does not exist, or move nothing.
    """
    nodes, num_chunks = schedule.world_size + schedule.switches, schedule.collective.num_chunks
    found: dict[tuple[int, int, bool], set[int]] = {}
    bad = 0
    for t in step:
        exists = min(t.src, t.dst) >= 0 and max(t.src, t.dst) < nodes and t.src != t.dst
        if exists and t.chunk >= 0 and t.count > 0 and t.chunk + t.count <= num_chunks:
            found.setdefault((t.src, t.dst, t.reduce), set()).update(range(t.chunk, t.chunk + t.count))
        else:
            bad += 1
    return [Message(src, dst, tuple(sorted(chunks)), reduce) for (src, dst, reduce), chunks in found.items()], bad


def shown_steps(schedule: Schedule, max_nodes: int, max_steps: int, what: str) -> tuple[list[list[Message]], list[str]]:
    """The messages of up to max_steps steps, and notes about what is left out.

    Raises UsageError if there are more ranks (or switches) than max_nodes.
    """
    nodes = schedule.world_size + schedule.switches
    if nodes > max_nodes:
        raise UsageError(
            f"{schedule.name} {schedule.collective.name} has {nodes} ranks and switches, but {what} shows up to "
            f"{max_nodes}: draw it over fewer ranks, or as text"
        )
    steps = flatten(schedule.steps)
    found = [messages(schedule, steps[i]) for i in range(min(len(steps), max_steps))]
    bad = sum(count for _, count in found)
    notes = [f"steps {max_steps} to {len(steps) - 1} not shown"] if len(steps) > max_steps else []
    notes += [f"not shown: {bad} transfers of ranks or chunks that do not exist"] if bad else []
    return [moved for moved, _ in found], notes


def chunk_range(first: int, count: int) -> str:
    """Chunks that follow each other: `c4`, `c4-7`."""
    return f"c{first}" if count == 1 else f"c{first}-{first + count - 1}"


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as short as can be, e.g. `0-3,6`."""
    return show_spans(numbers, ",", 2)


def title(schedule: Schedule) -> str:
    """One line: what the schedule is, over how many ranks, chunks and steps."""
    c = schedule.collective
    counts = (
        (c.world_size, "rank"),
        (schedule.switches, "switch"),
        (c.num_chunks, "chunk"),
        (schedule.num_steps, "step"),
    )
    numbers = [show_count(number, what) for number, what in counts if number or what != "switch"]
    root = [f"root {c.root}"] if c.rooted else []
    return " · ".join([f"{schedule.name} {c.name}", *numbers, *root])

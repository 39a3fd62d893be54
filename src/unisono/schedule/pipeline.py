"""A pipeline schedule as a value: for every rank, which stage works on which microbatch, in order. Never imports torch.

    pipeline 1f1b stages=2 microbatches=3
    rank 0: 0F0 0F1 0BW0 0F2 0BW1 0BW2
    rank 1: 1F0 1BW0 1F1 1BW1 1F2 1BW2

`0F2` is the forward of stage 0 for microbatch 2, `0B2` the gradient of its input, `0W2` that of its weights, `0BW2`
both at once. Messages are not written: for the same microbatch F needs F of the stage before and B needs B of the stage
after, and what lies on another rank is sent as soon as it is there. Blank lines and text after `#` are ignored. JSON
has the same rows: `{"pipeline": "1f1b", "stages": 2, "microbatches": 3, "actions": [["0F0", ...], ...]}`.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any, NamedTuple

from unisono.errors import UsageError

__all__ = ["KINDS", "Action", "PipelineSchedule", "numbered_lines"]

KINDS = ("F", "B", "W", "BW")
_ACTION = re.compile(r"(\d+)(F|BW|B|W)(\d+)")
_HEAD = re.compile(r"pipeline\s+(\S+)\s+stages=(\d+)\s+microbatches=(\d+)")
_ROW = re.compile(r"rank\s+(\d+)\s*:\s*(.*)")


class Action(NamedTuple):
    """One stage's forward (F), input gradient (B), weight gradient (W) or both gradients (BW) for one microbatch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def parts(self) -> tuple["Action", ...]:
        """The actions this one stands for: B and W for BW, else itself."""
        if self.kind == "BW":
            return self._replace(kind="B"), self._replace(kind="W")
        return (self,)

    def needs(self, num_stages: int) -> tuple["Action", ...]:
        """The dependencies of this action: F, B or W (never BW) of its stage or of neighbours; of BW, B's."""
        stage, kind, microbatch = self
        if kind == "F":
            return (Action(stage - 1, "F", microbatch),) if stage else ()
        if kind == "W":
            return (Action(stage, "B", microbatch),)
        before = (Action(stage, "F", microbatch),)
        return before if stage == num_stages - 1 else (*before, Action(stage + 1, "B", microbatch))


@dataclass(frozen=True, repr=False)
class PipelineSchedule:
    """`actions[rank]` is what a rank does, in order. Building one checks nothing: `verify` does."""

    name: str
    num_stages: int
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def world_size(self) -> int:
        """Ranks of the pipeline."""
        return len(self.actions)

    @cached_property
    def ranks(self) -> dict[int, int]:
        """The rank of every stage that appears; of a stage on several ranks, the first."""
        found: dict[int, int] = {}
        for rank, row in enumerate(self.actions):
            for action in row:
                found.setdefault(action.stage, rank)
        return dict(sorted(found.items()))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages a rank holds, in rising order."""
        return tuple(stage for stage, where in self.ranks.items() if where == rank)

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return (
            f"<{self.name} pipeline: {self.num_stages} stages on {self.world_size} ranks, "
            f"{self.num_microbatches} microbatches>"
        )

    def to_text(self) -> str:
        """A header, then one line per rank."""
        head = f"pipeline {self.name} stages={self.num_stages} microbatches={self.num_microbatches}"
        rows = [f"rank {rank}: {' '.join(map(str, row))}".rstrip() for rank, row in enumerate(self.actions)]
        return "\n".join([head, *rows]) + "\n"

    @classmethod
    def from_text(cls, text: str) -> "PipelineSchedule":
        """The schedule a text form describes. Raises UsageError naming the line that cannot be read."""
        lines = numbered_lines(text)
        number, line = lines[0] if lines else (1, "")
        head = _HEAD.fullmatch(line)
        if head is None:
            raise UsageError(f"line {number}: expected 'pipeline NAME stages=S microbatches=M', got {line!r}")
        rows = tuple(_row(rank, *numbered) for rank, numbered in enumerate(lines[1:]))
        return cls(head[1], int(head[2]), int(head[3]), rows)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists; an action is its text."""
        return {
            "pipeline": self.name,
            "stages": self.num_stages,
            "microbatches": self.num_microbatches,
            "actions": [list(map(str, row)) for row in self.actions],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "PipelineSchedule":
        """The schedule that to_json described. Raises UsageError if a field is missing or wrong."""
        try:
            rows = tuple(tuple(map(_action, row)) for row in data["actions"])
            return cls(data["pipeline"], index(data["stages"]), index(data["microbatches"]), rows)
        except (KeyError, TypeError) as problem:
            raise UsageError(
                f"not a pipeline in JSON ({problem}): expected the fields pipeline, stages, microbatches, actions"
            ) from None


def numbered_lines(text: str) -> list[tuple[int, str]]:
    """The lines of a text form with their numbers, from 1, without comments and blank ones."""
    numbered = ((number, line.split("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1))
    return [(number, line) for number, line in numbered if line]


def _row(rank: int, number: int, line: str) -> tuple[Action, ...]:
    row = _ROW.fullmatch(line)
    if row is None or int(row[1]) != rank:
        raise UsageError(f"line {number}: expected 'rank {rank}: 0F0 ...', got {line!r}")
    try:
        return tuple(map(_action, row[2].split()))
    except UsageError as problem:
        raise UsageError(f"line {number}: {problem}") from None


def _action(word: str) -> Action:
    found = _ACTION.fullmatch(word)
    if found is None:
        raise UsageError(f"{word!r} is no action: expected stage, {', '.join(KINDS)}, microbatch: 0F2")
    return Action(int(found[1]), found[2], int(found[3]))

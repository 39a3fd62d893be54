"""The data: transfers, steps, schedules.

A schedule is a sequence of steps; a step is a set of transfers that may all be under way at once; a transfer says
*chunks c .. c+count-1 go from rank a to rank b and are copied over, or reduced into, what is there*.

The rules of a step, which verify proves and programs rely on:

- A transfer carries the value its source held **when the step began**.
- Transfers of one step from a to b travel together as one message.
- Reductions take effect after all reads of the step; several may meet in one chunk, and are combined in rank order.
- A copy may land while others still read, so nothing else in the step may touch the chunk that a copy overwrites.

Steps are held as NumPy arrays and may be compact: `repeat=k` stands for k steps in a row, in the i-th of which every
chunk has moved by i * shift modulo `modulo`. A ring over n ranks is one such step; `Step.explicit()` writes it out.
Ids from world_size on are switches: they belong to no process, hold nothing at first, and can only be simulated.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unisono.errors import UsageError
from unisono.schedule.collectives import COMPOSITIONS, REVERSES, Collective

__all__ = ["LazySteps", "Schedule", "Step", "Transfer", "chain_steps"]

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Chunks chunk .. chunk+count-1 go from rank src to rank dst, copied over or reduced into what is there."""

    src: int
    dst: int
    chunk: int
    count: int = 1
    reduce: bool = False

    def __str__(self) -> str:
        chunks = f"c{self.chunk}" if self.count == 1 else f"c{self.chunk}-{self.chunk + self.count - 1}"
        return f"{self.src}>{self.dst} {chunks} {'+' if self.reduce else '='}"


@dataclass(frozen=True, eq=False)
class Step:
    """Transfers that are under way at once, as arrays of one length: src, dst, chunk, count int32, reduce bool.

    A compact step (repeat > 1) is `repeat` steps; in the i-th, transfer t moves chunk (chunk[t] + i * shift[t]) mod
    modulo. Iteration yields the Transfers of a plain step.
    """

    src: Ints
    dst: Ints
    chunk: Ints
    count: Ints
    reduce: NDArray[np.bool_]
    repeat: int = 1
    shift: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    modulo: int = 0

    @classmethod
    def make(
        cls,
        src: ArrayLike,
        dst: ArrayLike,
        chunk: ArrayLike,
        count: ArrayLike = 1,
        reduce: ArrayLike = False,
        *,
        repeat: int = 1,
        shift: ArrayLike = 0,
        modulo: int = 0,
    ) -> "Step":
        """A step from scalars and arrays, broadcast against each other.

        Raises UsageError if the lengths differ, or if repeat > 1 comes without a modulo.
        """
        if repeat < 1 or (repeat > 1 and modulo < 1):
            raise UsageError(f"a compact step needs repeat >= 1 and a modulo, got repeat={repeat}, modulo={modulo}")
        try:
            columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(a)) for a in (src, dst, chunk, count, shift)))
            reduces = np.broadcast_to(np.asarray(reduce, dtype=np.bool_), columns[0].shape)
        except ValueError:
            raise UsageError("the arrays of a step must have one length") from None
        if columns[0].ndim != 1:
            raise UsageError(f"the arrays of a step have one dimension, got {columns[0].ndim}")
        s, d, c, k, moved = (np.ascontiguousarray(a, dtype=np.int32) for a in columns)
        moved = moved if repeat > 1 else np.zeros(0, dtype=np.int32)
        return cls(s, d, c, k, np.ascontiguousarray(reduces), repeat, moved, modulo if repeat > 1 else 0)

    @classmethod
    def of(cls, *transfers: Transfer) -> "Step":
        """A step from transfers. Raises UsageError if a number does not fit 32 bits."""
        rows = [(t.src, t.dst, t.chunk, t.count, t.reduce) for t in transfers]
        try:
            columns = np.array(rows, dtype=np.int32).reshape(-1, 5).T
        except OverflowError:
            raise UsageError("a rank or chunk of a transfer must fit 32 bits") from None
        return cls.make(columns[0], columns[1], columns[2], columns[3], columns[4].astype(np.bool_))

    @classmethod
    def together(cls, *steps: "Step") -> "Step":
        """One step with the transfers of several plain steps, or of compact ones that repeat alike."""
        if len({(s.repeat, s.modulo) for s in steps}) != 1:
            raise UsageError("compact steps can only be joined if they repeat alike")
        return cls(
            np.concatenate([s.src for s in steps]),
            np.concatenate([s.dst for s in steps]),
            np.concatenate([s.chunk for s in steps]),
            np.concatenate([s.count for s in steps]),
            np.concatenate([s.reduce for s in steps]),
            steps[0].repeat,
            np.concatenate([s.shift for s in steps]),
            steps[0].modulo,
        )

    def __len__(self) -> int:
        return len(self.src)

    def __iter__(self) -> Iterator[Transfer]:
        if self.repeat > 1:
            raise UsageError("a compact step has no transfers of its own: iterate over explicit()")
        columns = (self.src.tolist(), self.dst.tolist(), self.chunk.tolist(), self.count.tolist(), self.reduce.tolist())
        return map(Transfer, *columns)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Step):
            return NotImplemented
        pairs = ((getattr(self, n), getattr(other, n)) for n in ("src", "dst", "chunk", "count", "reduce", "shift"))
        return (self.repeat, self.modulo) == (other.repeat, other.modulo) and all(
            np.array_equal(a, b) for a, b in pairs
        )

    def __hash__(self) -> int:
        return hash((self.src.tobytes(), self.dst.tobytes(), self.chunk.tobytes(), self.repeat))

    def __repr__(self) -> str:
        if self.repeat > 1:
            return f"<{self.repeat} steps of {len(self)} transfers each>"
        return ", ".join(map(str, self)) if len(self) <= 16 else f"<step of {len(self)} transfers>"

    def at(self, i: int) -> "Step":
        """The i-th of the steps that a compact step stands for, 0 <= i < repeat."""
        if self.repeat == 1:
            return self
        chunk = (self.chunk + np.int64(i) * self.shift.astype(np.int64)) % self.modulo
        return Step.make(self.src, self.dst, chunk, self.count, self.reduce)

    def explicit(self) -> Iterator["Step"]:
        """The plain steps this one stands for, in order."""
        return (self.at(i) for i in range(self.repeat))

    def reversed(self, reduce: bool) -> "Step":
        """Every transfer backwards (and repeats last to first), as reductions or as copies."""
        flags = np.full(len(self), reduce)
        if self.repeat == 1:
            return replace(self, src=self.dst, dst=self.src, reduce=flags)
        last = self.at(self.repeat - 1).chunk
        return replace(self, src=self.dst, dst=self.src, chunk=last, reduce=flags, shift=-self.shift)


class LazySteps(Sequence[Step]):
    """A sequence of `length` steps of which the i-th is made by `make(i)` when a rank looks at it."""

    def __init__(self, length: int, make: Callable[[int], Step]) -> None:
        self._length = max(length, 0)
        self._make = make

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Step: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Step, ...]: ...
    def __getitem__(self, index: int | slice) -> Step | tuple[Step, ...]:
        if isinstance(index, slice):
            return tuple(self._make(i) for i in range(*index.indices(self._length)))
        if not -self._length <= index < self._length:
            raise IndexError(f"step {index} of {self._length}")
        return self._make(index % self._length)


def chain_steps(first: Sequence[Step], second: Sequence[Step]) -> Sequence[Step]:
    """The steps of `first`, then those of `second`, without making lazy ones."""
    if isinstance(first, tuple) and isinstance(second, tuple):
        return first + second
    cut = len(first)
    return LazySteps(cut + len(second), lambda i: first[i] if i < cut else second[i - cut])


@dataclass(frozen=True, eq=False)
class Schedule:
    """A value: the algorithm's name, the collective it claims to do, and the steps that do it.

    `steps` is a tuple, or LazySteps when there are too many to hold; both may contain compact steps. Two schedules are
    equal if their collectives and their explicit steps are, whatever they are called.
    """

    name: str
    collective: Collective
    steps: Sequence[Step]
    switches: int = 0

    def __post_init__(self) -> None:
        if not self.name or any(ch.isspace() for ch in self.name):
            raise UsageError(f"a schedule's name is one word, got {self.name!r}")
        if isinstance(self.steps, list):
            object.__setattr__(self, "steps", tuple(self.steps))

    @property
    def world_size(self) -> int:
        """Number of ranks; ids from here on are switches."""
        return self.collective.world_size

    @cached_property
    def num_steps(self) -> int:
        """Number of explicit steps."""
        return sum(step.repeat for step in self.steps)

    def explicit_steps(self) -> Iterator[Step]:
        """Every step in plain form, in order, made one at a time."""
        for step in self.steps:
            yield from step.explicit()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        same = (self.collective, self.switches) == (other.collective, other.switches)
        if not same or self.num_steps != other.num_steps:
            return False
        return all(a == b for a, b in zip(self.explicit_steps(), other.explicit_steps(), strict=True))

    def __hash__(self) -> int:
        return hash((self.collective, self.switches, self.num_steps))

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        return f"<{self.name} {self.collective.name}: {self.world_size} ranks, {self.num_steps} steps>"

    def then(self, other: "Schedule", name: str | None = None) -> "Schedule":
        """This schedule followed by another: reduce_scatter then all_gather is all_reduce, and so on (COMPOSITIONS).

        Raises UsageError if the two together are no collective, or differ in ranks, chunks or root.
        """
        a, b = self.collective, other.collective
        whole = COMPOSITIONS.get((a.name, b.name))
        if whole is None:
            known = ", ".join(f"{first} then {second}" for first, second in COMPOSITIONS)
            raise UsageError(f"{a.name} followed by {b.name} is no collective: expected one of {known}")
        if (a.world_size, a.num_chunks) != (b.world_size, b.num_chunks):
            raise UsageError(
                f"{a.name} and {b.name} must have the same ranks and chunks to follow each other, got "
                f"{a.world_size} ranks, {a.num_chunks} chunks and {b.world_size} ranks, {b.num_chunks} chunks"
            )
        if a.rooted and b.rooted and a.root != b.root:
            raise UsageError(f"{a.name} ends at root {a.root} but {b.name} starts at root {b.root}")
        rooted = b.root if b.rooted else a.root
        root = rooted if whole in ("broadcast", "reduce") else 0
        joined = Collective(whole, a.world_size, a.num_chunks, root)
        label = name or (self.name if self.name == other.name else f"{self.name}+{other.name}")
        steps = chain_steps(self.steps, other.steps)
        return Schedule(label, joined, steps, max(self.switches, other.switches))

    def reversed(self, name: str | None = None) -> "Schedule":
        """Every transfer backwards, last step first: broadcast gives reduce, all_gather reduce_scatter, and so on.

        True to the collective when each rank receives each chunk at most once, as good algorithms do.
        Raises UsageError if this collective has no reverse (REVERSES).
        """
        mine = self.collective
        whole = REVERSES.get(mine.name)
        if whole is None:
            raise UsageError(f"{mine.name} cannot run backwards: expected one of {', '.join(REVERSES)}")
        theirs = replace(mine, name=whole)
        steps, last = self.steps, len(self.steps) - 1
        back = LazySteps(len(steps), lambda i: steps[last - i].reversed(theirs.reduces))
        return Schedule(name or self.name, theirs, tuple(back) if isinstance(steps, tuple) else back, self.switches)

    def as_barrier(self) -> "Schedule":
        """The same steps with empty chunks. Raises UsageError unless this is an all_reduce."""
        if self.collective.name != "all_reduce":
            raise UsageError(f"only an all_reduce serves as a barrier, not {self.collective.name}")
        return replace(self, collective=replace(self.collective, name="barrier"))

    def to_text(self) -> str:
        """The short text form: a header, then one line per explicit step, e.g. `step 0: 0>1 c0 +, 1>2 c1 +`."""
        from unisono.schedule.text import to_text

        return to_text(self)

    @staticmethod
    def from_text(text: str) -> "Schedule":
        """The schedule a text form describes. Raises UsageError naming the line that cannot be read."""
        from unisono.schedule.text import from_text

        return from_text(text)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists, ready for json.dumps."""
        from unisono.schedule.text import to_json

        return to_json(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Schedule":
        """The schedule that to_json described. Raises UsageError if a field is missing or wrong."""
        from unisono.schedule.text import from_json

        return from_json(data)

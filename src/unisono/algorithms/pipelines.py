"""Builders of pipeline schedules: pure functions from a shape to a `PipelineSchedule`. Never imports torch.

| name | source | stages on a rank | bubble |
| --- | --- | --- | --- |
| `gpipe` | Huang et al. 2019 | 1 | all forwards, then all backwards |
| `1f1b` | Narayanan et al. 2019 (PipeDream-Flush) | 1 | the same, with world_size microbatches in flight, not all |
| `interleaved` | Narayanan et al. 2021 (Megatron-LM) | v: r, r + p, ... | a v-th of it, for v times the messages |
| `zb-h1` | Qi et al. 2023 (zero bubble) | 1 | a third of it: W fills the gaps; memory as 1f1b |
| `zb-v` | Qi et al. 2024 (controllable memory) | 2, there and back: a V | none if F, B and W take the same time |
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from unisono.errors import UsageError, check_known
from unisono.schedule.pipeline import Action, PipelineSchedule

__all__ = [
    "SCHEDULES",
    "bubble_formula",
    "build_pipeline",
    "gpipe",
    "interleaved_1f1b",
    "one_f_one_b",
    "usual_stages_per_rank",
    "zb_h1",
    "zb_v",
]

PIPELINE = "pipeline"
"""The key of these schedules in the place of a collective."""

_Row = tuple[Action, ...]


def gpipe(world_size: int, num_microbatches: int) -> PipelineSchedule:
    """All forwards, then all backwards. 2 ranks, 2 microbatches: `0F0 0F1 0BW0 0BW1` and `1F0 1F1 1BW0 1BW1`."""
    _check(world_size, num_microbatches)
    every = range(num_microbatches)
    rows = [(*(Action(r, "F", m) for m in every), *(Action(r, "BW", m) for m in every)) for r in range(world_size)]
    return PipelineSchedule("gpipe", world_size, num_microbatches, tuple(rows))


def one_f_one_b(world_size: int, num_microbatches: int) -> PipelineSchedule:
    """Fill the pipeline, then one forward and one backward in turn. 2 ranks, 2 microbatches: `0F0 0F1 0BW0 0BW1`."""
    _check(world_size, num_microbatches)
    rows = []
    for rank in range(world_size):
        forward = [Action(rank, "F", m) for m in range(num_microbatches)]
        backward = [Action(rank, "BW", m) for m in range(num_microbatches)]
        rows.append(_in_turn(forward, backward, world_size - rank - 1))
    return PipelineSchedule("1f1b", world_size, num_microbatches, tuple(rows))


def interleaved_1f1b(world_size: int, num_microbatches: int, stages_per_rank: int = 2) -> PipelineSchedule:
    """1F1B over world_size × stages_per_rank stages, dealt out in turn: rank r has stages r, r + world_size, ...

    Microbatches go in groups of world_size through one stage after the other of a rank; where the last group is not
    full, the schedule for full groups is used and the microbatches it has too many are left out.
    2 ranks, 2 microbatches, rank 1: `1F0 1F1 3F0 3BW0 3F1 3BW1 1BW0 1BW1`.
    """
    _check(world_size, num_microbatches, stages_per_rank)
    full = -(-num_microbatches // world_size) * world_size
    groups = [range(m, m + world_size) for m in range(0, full, world_size)]
    rows = []
    for rank in range(world_size):
        stages = [rank + world_size * turn for turn in range(stages_per_rank)]
        forward = [Action(s, "F", m) for group in groups for s in stages for m in group]
        backward = [Action(s, "BW", m) for group in groups for s in reversed(stages) for m in group]
        row = _in_turn(forward, backward, 2 * (world_size - rank - 1) + (stages_per_rank - 1) * world_size)
        rows.append(_keep(row, num_microbatches))
    return PipelineSchedule("interleaved", world_size * stages_per_rank, num_microbatches, tuple(rows))


def zb_h1(world_size: int, num_microbatches: int) -> PipelineSchedule:
    """1F1B with the backward cut in two: B at once, since the rank before waits for it, W when nothing else is there.

    Rank r keeps r weight gradients back, so that no rank holds more microbatches than rank 0 does in 1F1B.
    2 ranks, 2 microbatches, rank 1: `1F0 1B0 1F1 1B1 1W0 1W1`.
    """
    _check(world_size, num_microbatches)
    rows = []
    for rank in range(world_size):
        forward = [Action(rank, "F", m) for m in range(num_microbatches)]
        backward = [Action(rank, "B", m) for m in range(num_microbatches)]
        row: list[Action] = []
        for action in _in_turn(forward, backward, world_size - rank - 1):
            row.append(action)
            if action.kind == "B" and action.microbatch >= rank:
                row.append(Action(rank, "W", action.microbatch - rank))
        late = range(max(num_microbatches - rank, 0), num_microbatches)
        rows.append((*row, *(Action(rank, "W", m) for m in late)))
    return PipelineSchedule("zb-h1", world_size, num_microbatches, tuple(rows))


def zb_v(world_size: int, num_microbatches: int) -> PipelineSchedule:
    """Two stages on each rank, r on the way there and 2 × world_size - 1 - r on the way back, with B and W apart.

    The rank that makes the loss of a microbatch is the one that began it, so its backward starts without a wait. Below
    2 × world_size - 1 microbatches the schedule for that many is used and the others left out.
    """
    _check(world_size, num_microbatches)
    full = max(num_microbatches, 2 * world_size - 1)
    rows = []
    for rank in range(world_size):
        there, back = _Stage(rank), _Stage(2 * world_size - 1 - rank)
        rows.append(_keep(_zb_v_row(there, back, rank, world_size, full), num_microbatches))
    return PipelineSchedule("zb-v", 2 * world_size, num_microbatches, tuple(rows))


class _Stage:
    """Hands out the actions of one stage, each kind in the order of microbatches."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.done = dict.fromkeys("FBW", 0)

    def next(self, kinds: str) -> Iterator[Action]:
        """The next action of each of the kinds, in their order."""
        for kind in kinds:
            yield Action(self.stage, kind, self.done[kind])
            self.done[kind] += 1


def _zb_v_row(there: _Stage, back: _Stage, rank: int, world_size: int, num_microbatches: int) -> Iterator[Action]:
    """The actions of a rank: fill the V, run it at F B W F B W, and empty it with B before W."""
    for _ in range(2 * (world_size - rank) - 1):
        yield from there.next("F")
    for _ in range(rank):
        yield from chain(back.next("F"), there.next("F"))
    for _ in range(world_size - rank):
        yield from back.next("FBW")
    while back.done["F"] < num_microbatches:
        if there.done["F"] < num_microbatches:
            yield from there.next("F")
        yield from chain(there.next("BW"), back.next("FBW"))
    for _ in range(rank):
        yield from chain(there.next("B"), back.next("B"))
    for _ in range(world_size - rank):
        yield from there.next("BW")
    for stage in (back, there):
        while stage.done["W"] < num_microbatches:
            yield from stage.next("W")


def _in_turn(forward: list[Action], backward: list[Action], lead: int) -> _Row:
    """`lead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    lead = min(lead, len(forward))
    steady = chain.from_iterable(zip(forward[lead:], backward, strict=False))
    return (*forward[:lead], *steady, *backward[len(forward) - lead :])


def _keep(row: Iterable[Action], num_microbatches: int) -> _Row:
    """A row without the microbatches that do not exist. What is left stays right: microbatches need only themselves."""
    return tuple(action for action in row if action.microbatch < num_microbatches)


def _check(world_size: int, num_microbatches: int, stages_per_rank: int = 1) -> None:
    named = {"rank": world_size, "microbatch": num_microbatches, "stage per rank": stages_per_rank}
    for name, value in named.items():
        if value < 1:
            raise UsageError(f"a pipeline needs at least one {name}, got {value}")


SCHEDULES: dict[str, Callable[..., PipelineSchedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved_1f1b,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
}


def usual_stages_per_rank(name: str) -> int:
    """The default number of stages per rank of a schedule: 1, or 2 for `interleaved` and `zb-v`.

    Raises UsageError for a name that is not in SCHEDULES.
    """
    check_known("pipeline schedule", name, SCHEDULES)
    return 2 if name in ("interleaved", "zb-v") else 1


def build_pipeline(
    name: str, world_size: int, microbatches: int = 8, stages_per_rank: int | None = None, **others: object
) -> PipelineSchedule:
    """The schedule of a name in SCHEDULES for so many ranks. Only `interleaved` leaves stages_per_rank free.

    Raises UsageError for another name, another option, counts below 1, and a stages_per_rank that the schedule cannot
    have.
    """
    usual = usual_stages_per_rank(name)
    if others:
        raise UsageError(f"{name} pipeline has no option {', '.join(others)} (it has: microbatches, stages_per_rank)")
    if name == "interleaved":
        return interleaved_1f1b(world_size, microbatches, usual if stages_per_rank is None else stages_per_rank)
    if stages_per_rank not in (None, usual):
        raise UsageError(
            f"{name} has {usual} stage{'s'[: usual - 1]} on a rank, not {stages_per_rank}: use interleaved"
        )
    return SCHEDULES[name](world_size, microbatches)


def bubble_formula(
    schedule: PipelineSchedule, forward: float = 1.0, input_gradient: float = 1.0, weight_gradient: float = 1.0
) -> float | None:
    """The share of its time that a rank is idle, as the literature has it: idle / (idle + work), links free.

    The times are those of all the stages of a rank for one microbatch, in any unit. None where no formula holds:
    `interleaved` wants whole groups of world_size microbatches; `zb-h1` that many or more, and weight gradients no
    slower than forwards; `zb-v` three equal times and 2 × world_size - 1 microbatches or more; others have none.
    """
    p, m = schedule.world_size, schedule.num_microbatches
    whole = forward + input_gradient + weight_gradient
    match schedule.name:
        case "gpipe" | "1f1b":
            idle = (p - 1) * whole
        case "interleaved" if m % p == 0:
            idle = (p - 1) * whole * p / schedule.num_stages
        case "zb-h1" if m >= p and weight_gradient <= forward:
            idle = (p - 1) * (forward + input_gradient - weight_gradient)
        case "zb-v" if m >= 2 * p - 1 and forward == input_gradient == weight_gradient:
            idle = 0.0
        case _:
            return None
    return idle / (idle + m * whole) if whole else 0.0

"""`verify`: prove that a schedule does what it says, or show everything that is wrong with it. Never imports torch.

Schedules of collectives are proved by verification/collective.py, those of pipelines by verification/pipeline.py;
programs and tables, what the ranks execute of a schedule, by program/proof.py.
"""

from collections.abc import Sequence
from typing import overload

from unisono.errors import UsageError
from unisono.program import Program, Table
from unisono.program.proof import Proof, prove_rows
from unisono.schedule import PipelineSchedule, Schedule
from unisono.verification.collective import KINDS, check_collective
from unisono.verification.order import SumOrder, sum_order
from unisono.verification.pipeline import check_pipeline
from unisono.verification.report import Finding, Report

__all__ = ["KINDS", "Finding", "Report", "SumOrder", "sum_order", "verify"]


@overload
def verify(schedule: Schedule | PipelineSchedule, in_flight: int | None = None, in_place: bool = False) -> Report: ...


@overload
def verify(
    schedule: Sequence[Table] | Sequence[Program],
    in_flight: None = None,
    in_place: bool = False,
    *,
    sizes: Sequence[int] = (),
    area: int = 0,
) -> Proof: ...


def verify(
    schedule: Schedule | PipelineSchedule | Sequence[Table] | Sequence[Program],
    in_flight: int | None = None,
    in_place: bool = False,
    *,
    sizes: Sequence[int] = (),
    area: int = 0,
) -> Report | Proof:
    """Prove a schedule: the report is true if it is right, and draws every defect if it is not.

    Defects are reported, not raised: `assert verify(s)` fails on a wrong schedule, `print(verify(s))` shows the
    counterexample, `verify(s).raise_if_bad()` raises it.

    Args:
        schedule: of a collective or a pipeline; or the programs or tables of all ranks, see `prove_rows`.
        in_flight: messages under way per rank, at most; None: as many as the schedule needs.
        in_place: one buffer for input and output.
        sizes: bytes of every block, for programs.
        area: bytes of every rank's staging memory, for programs.

    Raises:
        UsageError: it is no schedule, or too large to follow every contribution, or a number is out of range.

    """
    if isinstance(schedule, PipelineSchedule):
        if in_flight is not None or in_place:
            raise UsageError(f"{schedule.name} is of a pipeline: in_flight and in_place are for collectives")
        return check_pipeline(schedule)
    if isinstance(schedule, Schedule):
        return check_collective(schedule, in_flight, in_place)
    if isinstance(schedule, list | tuple) and schedule and all(isinstance(each, Program | Table) for each in schedule):
        return prove_rows(schedule, sizes, area, in_place)
    if isinstance(schedule, list | tuple) and any(isinstance(each, Schedule | PipelineSchedule) for each in schedule):
        raise UsageError("verify takes one schedule at a time, or the programs of all ranks: verify each by itself")
    raise UsageError(
        f'verify takes a schedule, got {schedule!r:.60}: build it first, e.g. build("ring", "all_reduce", world_size=4)'
    )

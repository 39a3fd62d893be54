"""The bubble that was measured next to the one that was predicted."""

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.parallel.pipeline_actions import PipelineSchedule
from unisono.parallel.pipeline_simulate import PipelineCosts, PipelineTimeline, Slot, simulate_pipeline

__all__ = ["PipelineReport"]


@dataclass(frozen=True)
class PipelineReport:
    """Two timelines of the same step in seconds: as it was, and as its own mean times of F, B and W predict it."""

    measured: PipelineTimeline
    predicted: PipelineTimeline

    @classmethod
    def of(cls, schedule: PipelineSchedule, slots: Sequence[Sequence[Slot]]) -> "PipelineReport":
        """From what every rank measured; times are seconds since any moment, the same for all ranks of a host."""
        measured = PipelineTimeline(schedule, tuple(map(tuple, slots)))
        return cls(measured, simulate_pipeline(schedule, _mean_costs(measured)))

    def __str__(self) -> str:
        measured, predicted = self.measured, self.predicted
        lines = [
            f"{measured.schedule.name}: bubble {measured.bubble:.1%}, predicted {predicted.bubble:.1%} from what each "
            "stage takes and free links",
            "rank  busy ms  idle  predicted",
        ]
        for rank, busy in enumerate(measured.busy):
            idle, foreseen = measured.bubbles[rank], predicted.bubbles[rank]
            lines.append(f"{rank:4}  {busy * 1e3:7.1f}  {idle:4.0%}  {foreseen:9.0%}")
        return "\n".join(lines)


def _mean_costs(line: PipelineTimeline) -> PipelineCosts:
    """The mean time of each kind of action in each stage; that of BW counts as half B, half W."""
    totals: dict[tuple[int, str], tuple[float, int]] = {}
    for slot in (slot for row in line.slots for slot in row):
        parts = slot.action.parts
        for part in parts:
            time, count = totals.get((part.stage, part.kind), (0.0, 0))
            totals[part.stage, part.kind] = (time + (slot.end - slot.start) / len(parts), count + 1)
    means = {key: time / count for key, (time, count) in totals.items()}
    stages = range(line.schedule.num_stages)
    forward, input_gradient, weight_gradient = ([means.get((s, kind), 0.0) for s in stages] for kind in "FBW")
    return PipelineCosts(forward, input_gradient, weight_gradient)

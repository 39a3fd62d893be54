"""Which steps of a schedule a picture shows, or why it cannot show any."""

from dataclasses import dataclass

from unisono.draw.messages import Message, messages
from unisono.errors import UsageError
from unisono.schedule import Schedule
from unisono.schedule.transform import flatten

__all__ = ["Shown", "shown_steps"]


@dataclass(frozen=True)
class Shown:
    """The messages of the first steps of a schedule, and notes about what is left out."""

    steps: list[list[Message]]
    notes: list[str]


def shown_steps(schedule: Schedule, max_nodes: int, max_steps: int, what: str) -> Shown:
    """The messages of up to max_steps steps. Raises UsageError if there are more ranks (or switches) than max_nodes."""
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
    return Shown([moved for moved, _ in found], notes)

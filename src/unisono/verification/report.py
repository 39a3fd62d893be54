"""The result of `verify`: all defects, drawn; falsy if there is one."""

from dataclasses import dataclass

from unisono.errors import ScheduleError
from unisono.schedule import PipelineSchedule, Schedule
from unisono.units import show_count

__all__ = ["Finding", "Report"]


@dataclass(frozen=True)
class Finding:
    """One defect: its kind, a message, a picture with an arrow at the place, and where it shows.

    Of a collective, `step` is the step where it shows (num_steps: at the end) and `steps` the shortest list of steps
    that shows it, as drawn in the picture. Of a pipeline, `rank` is the rank whose row is drawn, None if there is none.
    """

    kind: str
    message: str
    picture: str = ""
    step: int = 0
    steps: tuple[int, ...] = ()
    rank: int | None = None

    def __str__(self) -> str:
        drawn = "\n".join(f"    {line}" for line in self.picture.splitlines())
        return f"{self.kind}: {self.message}" + (f"\n{drawn}" if drawn else "")


@dataclass(frozen=True, repr=False)
class Report:
    """All findings about a schedule, in the order of the steps or ranks; false in a condition if there are any.

    `in_flight`: messages under way per rank with which a collective cannot deadlock. `in_place`: one buffer serves for
    its input and output. `notes`: transfers that could be left out. Printed, it says `correct` or draws every finding.
    """

    schedule: Schedule | PipelineSchedule
    findings: tuple[Finding, ...]
    subject: str
    in_flight: int = 0
    in_place: bool = True
    notes: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        """True if nothing was found."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if not self.ok:
            return "\n\n".join(
                [f"{self.subject}: {show_count(len(self.findings), 'finding')}", *map(str, self.findings)]
            )
        words = [f"needs {show_count(self.in_flight, 'message')} in flight per rank"] if self.in_flight else []
        words += ["not in place"] if not self.in_place else []
        needs = ", ".join(words)
        if self.notes:
            needs += f"; {show_count(len(self.notes), 'note')}: transfers that could be left out in part"
        return f"{self.subject}: correct" + (f" ({needs})" if needs else "")

    def __repr__(self) -> str:
        return f"<{str(self).partition(chr(10))[0]}>"

    def raise_if_bad(self) -> None:
        """Raise ScheduleError with all findings if there are any."""
        if self.findings:
            raise ScheduleError(str(self))

"""The one loop over the slots of a schedule, and what is asked before it starts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from unisono.errors import UsageError
from unisono.schedule import Schedule, Topology
from unisono.simulation.clock import Clock, Times
from unisono.simulation.slots import Load, Part, Slot, load_of, slots

__all__ = ["Observer", "Setting", "play"]


@dataclass(frozen=True)
class Setting:
    """The input of a simulation: a schedule on a topology with so many bytes, every chunk cut into `chunks` pieces.

    Raises UsageError if the topology has another number of ranks, or a number is out of range.
    """

    schedule: Schedule
    topology: Topology
    nbytes: float
    chunks: int = 1
    eager: bool = False

    def __post_init__(self) -> None:
        ranks = self.schedule.world_size
        if self.topology.world_size != ranks:
            raise UsageError(
                f"{self.schedule.name} is for {ranks} ranks, but topology {self.topology.name} has "
                f"{self.topology.world_size}: build one for the other"
            )
        if not self.nbytes >= 0 or self.chunks < 1:
            raise UsageError(
                f"simulate needs nbytes of at least 0 and at least 1 chunk, got {self.nbytes} and {self.chunks}"
            )

    def clock(self) -> Clock:
        """A clock at zero."""
        return Clock(self.topology, self.schedule.switches, self.eager)

    def loads(self) -> Iterator[tuple[Slot, Load]]:
        """The slots in order, each with its messages."""
        for slot in slots(self.schedule, self.chunks):
            yield slot, load_of(slot, self.schedule, self.topology, self.nbytes, self.chunks)


class Observer(Protocol):
    """Somebody who watches the messages go by, as long as there are not too many."""

    def wants(self, messages: int) -> bool:
        """True if so many more messages are shown one slot at a time; if not, they pass in leaps, unseen."""

    def see(self, parts: tuple[Part, ...], load: Load, times: Times) -> None:
        """One slot has passed."""

    def miss(self, slot: Slot, load: Load) -> None:
        """All repeats of this slot have passed unseen."""


def play(setting: Setting, clock: Clock, observers: list[Observer]) -> None:
    """Run the clock to the end."""
    for slot, load in setting.loads():
        if not len(load):
            continue
        watched = True in [observer.wants(len(load) * slot.repeat) for observer in observers]  # all are asked
        if slot.repeat > 1 and not watched:
            clock.advance_alike(load, slot.repeat)
            for observer in observers:
                observer.miss(slot, load)
            continue
        for i in range(slot.repeat):
            times = clock.advance(load)
            for observer in observers:
                observer.see(slot.at(i), load, times)

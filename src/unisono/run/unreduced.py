"""Any schedule with its sums postponed: the way to one fixed order of summation.

Where the schedule reduces a partial sum into another, the contributions that the partial sum stands for are *moved* and
kept apart; where the last of them arrives, all are added up in rank order, and from there the sum travels as the
schedule says. So the result is ((x0 + x1) + x2) + ... whatever the algorithm, the chunking and the transport, the same
bits as the backend's own path.

The price is in the bytes: a partial sum of m contributions travels as m. Schedules that bring contributions straight to
where they are summed (one_shot, two_phase, star) pay nothing; in a ring the reduce-scatter's bytes grow by n/2, in
recursive doubling each step doubles them. Each rank keeps up to n + 1 copies of what it sums.
"""

from collections.abc import Iterable, Iterator

from unisono.errors import ScheduleError
from unisono.schedule import Schedule

__all__ = ["Unit", "unreduced"]

Unit = tuple[int, int, int, bool]
"""A transfer of one chunk: source, destination, chunk, whether it is reduced into what is there."""


def unreduced(schedule: Schedule, steps: Iterable[list[Unit]]) -> Iterator[tuple[list[Unit], list[tuple[int, int]]]]:
    """Each of `steps` in units of single contributions, all copies, and the sums (rank, chunk) complete after it.

    With C chunks and n ranks, chunk id j * C + c is rank j's contribution to chunk c, and n * C + c is the sum. A
    first, empty step is put before, for one rank alone completes every sum at once. Raises ScheduleError if the
    schedule would count a contribution twice.
    """
    n, width = schedule.collective.world_size, schedule.collective.num_chunks
    everybody = (1 << n) - 1
    held = [[1 << rank] * width for rank in range(n)]  # bit j: rank j's contribution is there
    yield [], [(0, chunk) for chunk in range(width)] if n == 1 else []
    for number, units in enumerate(steps):
        moved: list[Unit] = []
        values = [held[src][chunk] for src, _, chunk, _ in units]
        for (src, dst, chunk, reduce), value in zip(units, values, strict=True):
            who = [n] if value == everybody else [j for j in range(n) if value >> j & 1]
            moved += [(src, dst, j * width + chunk, False) for j in who]
            if not reduce:
                held[dst][chunk] = value
        complete = set()
        for (_, dst, chunk, reduce), value in zip(units, values, strict=True):
            if not reduce:
                continue
            if held[dst][chunk] & value:
                raise ScheduleError(
                    f"step {number} of {schedule.name} adds contributions to chunk {chunk} at rank {dst} that it holds "
                    "already: verify() shows how"
                )
            held[dst][chunk] |= value
            if held[dst][chunk] == everybody:
                complete.add((dst, chunk))
        yield moved, sorted(complete)

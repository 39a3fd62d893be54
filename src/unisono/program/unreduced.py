"""Any schedule with its sums postponed: the way to one fixed order of summation.

Where the schedule reduces a partial sum into another, the contributions that the partial sum stands for are *moved* and
kept apart; where the last of them arrives, all are added up in rank order, and from there the sum travels as the
schedule says. So the result is ((x0 + x1) + x2) + ... whatever the algorithm, the chunking and the transport, the same
bits as the backend's own path.

The price is in the bytes: a partial sum of m contributions travels as m. Schedules that bring contributions straight to
where they are summed (one_shot, two_phase, star) pay nothing; in a ring the reduce-scatter's bytes grow by n/2, in
recursive doubling each step doubles them. Each rank keeps up to n + 1 copies of what it sums (of one piece at a time
over the board), and results no longer come in place. Measured over the board with 4 ranks on 2 cores, all_reduce of
float32, best of 12 with other work on the machine, in ms:

                          64 KiB                        16 MiB
                          as it is    in rank order     as it is    in rank order
    ring                  1.3         1.9               40          120
    halving_doubling      1.1         1.2               44          98
    double_tree           1.0         1.4               39          108
    two_phase             0.7         1.1               43          88
    one_shot              0.7         0.6               64          136
"""

from collections.abc import Iterable, Iterator

from unisono.errors import ScheduleError
from unisono.schedule import Schedule

__all__ = ["Unit", "unreduced"]

Unit = tuple[int, int, int, bool]
"""A transfer of one chunk: source, destination, chunk, whether it is reduced into what is there."""


def unreduced(schedule: Schedule, steps: Iterable[list[Unit]]) -> Iterator[tuple[list[Unit], list[tuple[int, int]]]]:
    """Each of `steps` in units of single contributions, all copies, and the sums (rank, chunk) complete after it.

    With C chunks and n ranks, chunk id j * C + c is rank j's contribution to chunk c, and n * C + c is the sum. One
    rank alone gets an empty step in which every sum is complete. Raises ScheduleError if the schedule would count a
    contribution twice.
    """
    n, width = schedule.collective.world_size, schedule.collective.num_chunks
    full = (1 << n) - 1
    held = [[1 << rank] * width for rank in range(n)]  # bit j: rank j's contribution is there
    if n == 1:
        yield [], [(0, chunk) for chunk in range(width)]
    for number, units in enumerate(steps):
        moved: list[Unit] = []
        values = [held[src][chunk] for src, _, chunk, _ in units]
        for (src, dst, chunk, reduce), value in zip(units, values, strict=True):
            who = [n] if value == full else [j for j in range(n) if value >> j & 1]
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
            if held[dst][chunk] == full:
                complete.add((dst, chunk))
        yield moved, sorted(complete)

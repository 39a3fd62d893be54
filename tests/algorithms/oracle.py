"""An independent judge of schedules: run them on numbers, transfer by transfer, and count bytes."""

import numpy as np

from unisono.schedule import Schedule, Transfer

_GARBAGE = 7 * 10**15


def well_formed(schedule: Schedule, t: Transfer) -> bool:
    nodes, chunks = schedule.world_size + schedule.switches, schedule.collective.num_chunks
    ranks = 0 <= t.src < nodes and 0 <= t.dst < nodes and t.src != t.dst
    return ranks and t.count > 0 and t.chunk >= 0 and t.chunk + t.count <= chunks


def numbers_are_right(schedule: Schedule, seed: int = 0) -> bool:
    """Whether random integers, moved as the schedule says, end as the collective promises.

    Ranks start with garbage where they hold nothing, switches with zeros; a step reads before it writes.
    """
    before, after = schedule.collective.held_before(), schedule.collective.held_after()
    values = np.random.default_rng(seed).integers(1, 10**12, size=before.shape).astype(object)
    n = schedule.world_size
    buffers = np.zeros((n + schedule.switches, before.shape[1]), dtype=object)
    buffers[:n] = np.where(before, values, _GARBAGE)
    for step in schedule.explicit_steps():
        old = buffers.copy()
        for t in filter(lambda t: well_formed(schedule, t), step):
            part = slice(t.chunk, t.chunk + t.count)
            if t.reduce:
                buffers[t.dst, part] += old[t.src, part]
            else:
                buffers[t.dst, part] = old[t.src, part]
    wanted = np.where(before, values, 0).sum(axis=0)
    return all((buffers[r][after[r]] == wanted[after[r]]).all() for r in range(n))


def busiest_share(schedule: Schedule) -> float:
    """Bytes that the busiest rank sends, as a share of the collective's bytes."""
    sent = np.zeros(schedule.world_size + schedule.switches)
    for step in schedule.explicit_steps():
        np.add.at(sent, step.src, step.count)
    return float(sent[: schedule.world_size].max()) * schedule.collective.chunk_nbytes(1.0)

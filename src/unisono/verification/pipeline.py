"""The proof of a pipeline schedule: every microbatch through every stage once, in order, and no rank waits for ever.

    range       an action of a stage, microbatch or kind that does not exist
    home        a stage that is on two ranks
    lost        an action that no rank does
    twice       an action that is done more than once
    order       an action before what it needs from the same rank
    deadlock    ranks that wait for each other

A finding is drawn as the rank's row with an arrow at the place:

    twice: rank 1, action 2: 1F0 is done twice, first as action 0
        1F0 1BW0 1F0
                 ^^^
"""

from collections.abc import Iterator

from unisono.schedule.pipeline import KINDS, Action, PipelineSchedule
from unisono.units import show_count
from unisono.verification.report import Finding, Report

__all__ = ["check_pipeline"]

_AROUND = 4  # actions shown before and after the place

_Places = dict[Action, list[tuple[int, int]]]


def check_pipeline(schedule: PipelineSchedule) -> Report:
    """All findings about a schedule, each with the rank's row and an arrow at the place."""
    stages, ranks = show_count(schedule.num_stages, "stage"), show_count(schedule.world_size, "rank")
    microbatches = show_count(schedule.num_microbatches, "microbatch")
    return Report(
        schedule, tuple(_findings(schedule)), f"{schedule.name} pipeline, {stages} on {ranks}, {microbatches}"
    )


def _findings(schedule: PipelineSchedule) -> list[Finding]:
    places: _Places = {}
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            for part in action.parts:
                places.setdefault(part, []).append((rank, index))
    if min(schedule.num_stages, schedule.num_microbatches, schedule.world_size) < 1:
        return [Finding("range", "a pipeline needs at least one stage, one microbatch and one rank")]
    findings = [*_strangers(schedule), *_homes(schedule), *_counts(schedule, places), *_order(schedule, places)]
    return [*findings, *_waits(schedule, places)]


def _found(schedule: PipelineSchedule, kind: str, what: str, rank: int | None, place: int | None = None) -> Finding:
    """A finding about an action of a rank (place None: about one that is missing), drawn in its row."""
    if rank is None or place is None:
        return Finding(kind, what if rank is None else f"rank {rank}: {what}", rank=rank)
    row = [str(action) for action in schedule.actions[rank]]
    first, last = max(place - _AROUND, 0), place + _AROUND + 1
    before = ["…"] * (first > 0) + row[first:place]
    line = " ".join([*before, *row[place:last], *["…"] * (last < len(row))])
    arrow = " " * sum(len(word) + 1 for word in before) + "^" * len(row[place])
    return Finding(kind, f"rank {rank}, action {place}: {what}", f"{line}\n{arrow}", rank=rank)


def _strangers(schedule: PipelineSchedule) -> Iterator[Finding]:
    """Actions of stages, microbatches or kinds that do not exist."""
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            if not 0 <= action.stage < stages:
                yield _found(schedule, "range", f"{action}: there are only stages 0 to {stages - 1}", rank, index)
            if not 0 <= action.microbatch < microbatches:
                yield _found(
                    schedule, "range", f"{action}: there are only microbatches 0 to {microbatches - 1}", rank, index
                )
            if action.kind not in KINDS:
                yield _found(schedule, "range", f"{action}: expected one of {', '.join(KINDS)}", rank, index)


def _homes(schedule: PipelineSchedule) -> Iterator[Finding]:
    """Stages that are on more than one rank."""
    reported = set()
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            home = schedule.ranks[action.stage]
            if home != rank and (rank, action.stage) not in reported:
                reported.add((rank, action.stage))
                yield _found(
                    schedule, "home", f"stage {action.stage} is on rank {rank} and on rank {home}", rank, index
                )


def _counts(schedule: PipelineSchedule, places: _Places) -> Iterator[Finding]:
    """F, B and W of every stage and microbatch: once each."""
    for stage in range(schedule.num_stages):
        for kind in "FBW":
            wanted = [Action(stage, kind, m) for m in range(schedule.num_microbatches)]
            missing = [str(action) for action in wanted if action not in places]
            if missing:
                more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
                yield _found(
                    schedule, "lost", f"no rank does {', '.join(missing[:3])}{more}", schedule.ranks.get(stage)
                )
            for action in wanted:
                first, *others = places.get(action, [(0, 0)])
                for rank, index in others:
                    elsewhere = f" on rank {first[0]}" if first[0] != rank else ""
                    text = f"{action} is done twice, first as action {first[1]}{elsewhere}"
                    yield _found(schedule, "twice", text, rank, index)


def _order(schedule: PipelineSchedule, places: _Places) -> Iterator[Finding]:
    """Checks that a rank runs an action after those it depends on."""
    for action, found in places.items():
        rank, index = found[0]
        for need in action.needs(schedule.num_stages):
            where = places.get(need, [(-1, -1)])[0]
            if where[0] == rank and where[1] > index:
                yield _found(schedule, "order", f"{action} comes before {need}, which it needs", rank, index)


def _waits(schedule: PipelineSchedule, places: _Places) -> Iterator[Finding]:
    """Cycles of ranks that wait for each other, found by letting every rank go as far as it can."""
    at = [0] * schedule.world_size
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            while at[rank] < len(row) and not _lacking(schedule, row[at[rank]], done):
                done.update(row[at[rank]].parts)
                at[rank] += 1
                moved = True
    waits = {}
    for rank, row in enumerate(schedule.actions):
        if at[rank] < len(row):
            need = _lacking(schedule, row[at[rank]], done)[0]
            if need in places:
                waits[rank] = (row[at[rank]], need, places[need][0][0])
    for cycle in _cycles({rank: wait[2] for rank, wait in waits.items()}):
        chain = ", ".join(f"rank {r} at {waits[r][0]} waits for {waits[r][1]} of rank {waits[r][2]}" for r in cycle)
        if len(cycle) > 1:  # a rank that waits for itself is an order that `_order` has named
            text = f"ranks wait for each other for ever: {chain}"
            yield _found(schedule, "deadlock", text, cycle[0], at[cycle[0]])


def _lacking(schedule: PipelineSchedule, action: Action, done: set[Action]) -> list[Action]:
    """The dependencies of an action that are not done."""
    return [need for need in action.needs(schedule.num_stages) if need not in done]


def _cycles(waits_for: dict[int, int]) -> Iterator[list[int]]:
    """The cycles of a graph in which every node points to one other at most."""
    seen: set[int] = set()
    for start in waits_for:
        path: list[int] = []
        node = start
        while node in waits_for and node not in seen:
            seen.add(node)
            path.append(node)
            node = waits_for[node]
        if node in path:
            yield path[path.index(node) :]

"""The state of every job of this user on this host: the snapshot that `unisono ps` shows.

It is put together from what the ranks write anyway (segment_reader.py) and what the kernel knows of their processes, so
that it disturbs no process and works on jobs that hang, and on ranks that are stopped. Never imports torch.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.transport.layout import GAVE_UP, LEFT
from unisono.transport.process import Identity, alive, fate, stopped
from unisono.units import show_seconds, show_spans
from unisono.watch.segment_reader import Findings, Member, SegmentView, read_segments
from unisono.watch.status_page import PageView

__all__ = ["GroupStatus", "Job", "RankStatus", "remarks", "snapshot"]

_PATIENCE = 1.0  # s of waiting before it is worth a sentence
_AWAY = 0.15  # s after which a call without a waiter counts as one in the background
_STRAGGLES = 0.001  # s of mean delay from which a rank may be called late
_ENOUGH = 4  # calls from which on a mean delay says something
_MESSAGE = re.compile(
    r"^rank \d+ \(pid \d+[^)]*\): (.*) (from|to) (any rank|rank (\d+)) \(tag (\d+), (.*)\) waits: (.*)$"
)


@dataclass(frozen=True)
class RankStatus:
    """One rank. ``state``: waiting, in call, elsewhere, stopped, dead, left, given up or absent.

    ``call`` is the call it is in; elsewhere, the last one it completed. ``number`` counts it in ``group``, 0 for
    messages. ``seconds``: how long it has been so, -1 if that is not known. ``late``: mean delay behind the first rank
    over the last calls of the default group, in seconds. ``place``: the line of the program that waits, if known.
    ``host``: the name of its host, in a job over several. ``gpu_call``: the last call on GPUs that it has issued, in
    ``gpu_group``, whose number there is ``gpu_number``; whether its GPU has come to it is not known.
    """

    rank: int
    pid: int
    state: str
    call: str = ""
    number: int = 0
    nbytes: int = 0
    group: str = ""
    seconds: float = -1.0
    waits_for: tuple[int, ...] = ()
    pending: int = 0
    place: str = ""
    words: str = ""
    late: float = 0.0
    straggler: bool = False
    host: str = ""
    gpu_call: str = ""
    gpu_number: int = 0
    gpu_group: str = ""


@dataclass(frozen=True)
class GroupStatus:
    """One group: its global ranks, the calls completed by all, the number of the newest call, calls per second now."""

    label: str
    ranks: tuple[int, ...]
    completed: int
    issued: int
    per_second: float
    compared: int
    late: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """Groups that share processes. ``pid`` is the process of its first rank; ``remarks`` say what is wrong, if any."""

    pid: int
    command: str
    seconds: float
    ranks: tuple[RankStatus, ...]
    groups: tuple[GroupStatus, ...]
    remarks: tuple[str, ...]
    identities: dict[int, Identity] = field(default_factory=dict, repr=False)


def snapshot(pid: int | None = None, find: Callable[[], Findings] = read_segments) -> list[Job]:
    """All jobs of this user on this host, or the one that process ``pid`` is a rank of, or started, now."""
    findings = find()
    jobs = [_job(memories, findings.pages) for memories in _together(findings.memories)]
    living = [job for job in jobs if any(rank.state not in ("dead", "left", "absent") for rank in job.ranks)]
    mine = [job for job in living if pid is None or any(pid in _line(rank.pid) for rank in job.ranks)]
    return sorted(mine, key=lambda job: job.pid)


def _together(memories: Iterable[SegmentView]) -> list[list[SegmentView]]:
    """Groups that share a process, largest group first in each."""
    jobs: list[tuple[set[Identity], list[SegmentView]]] = []
    for memory in memories:
        whose = {member.who for member in memory.members if member.who.pid}
        mine = [memory]
        for job in [job for job in jobs if job[0] & whose]:
            jobs.remove(job)
            whose |= job[0]
            mine += job[1]
        jobs.append((whose, mine))
    return [sorted(mine, key=lambda m: (-len(m.members), m.label)) for _, mine in jobs]


def _job(memories: Sequence[SegmentView], pages: dict[Identity, PageView]) -> Job:
    now = max(memory.read_at for memory in memories)
    main = memories[0]
    compared, late = main.lateness()
    late = late if compared >= _ENOUGH else {}
    seats = {member.rank: member for memory in reversed(memories) for member in memory.members}
    ranks = [_rank(seats[name], memories, pages.get(seats[name].who), late, now) for name in sorted(seats)]
    identities = {name: seats[name].who for name in sorted(seats) if seats[name].who.pid}
    first = next(iter(identities.values()), Identity(0, 0))
    seconds = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - first.started / os.sysconf("SC_CLK_TCK"))
    groups = tuple(_group(memory) for memory in memories)
    return Job(first.pid, _command(first.pid), seconds, tuple(ranks), groups, remarks(ranks, compared), identities)


def _group(memory: SegmentView) -> GroupStatus:
    here = [member for member in memory.members if member.who.pid]
    compared, late = memory.lateness()
    return GroupStatus(
        memory.label,
        tuple(memory.global_ranks),
        min((member.completed for member in here), default=0),
        max((member.issued for member in here), default=0),
        memory.pace(),
        compared,
        late,
    )


def _rank(
    seat: Member, memories: Sequence[SegmentView], page: PageView | None, late: dict[int, float], now: int
) -> RankStatus:
    """The state of one rank; ``seat`` is its record in the largest group it is in."""
    rank, pid = seat.rank, seat.who.pid
    if not pid:
        return RankStatus(rank, pid, "absent", words="has not joined")
    if seat.state == LEFT:
        return RankStatus(rank, pid, "left", words=seat.exit_note or "has left the group")
    if not alive(seat.who):
        return RankStatus(rank, pid, "dead", words=seat.exit_note or fate(seat.who))
    worst = max(late, key=lambda rank: late[rank], default=-1)
    others = sorted(delay for rank, delay in late.items() if rank != worst)
    delay = late.get(seat.rank, 0.0)
    straggles = seat.rank == worst and delay > _STRAGGLES and delay > 3 * others[len(others) // 2]
    return replace(_doing(seat, memories, page, now), late=delay, straggler=straggles)


def _doing(seat: Member, memories: Sequence[SegmentView], page: PageView | None, now: int) -> RankStatus:
    """The state of a live rank."""
    mine = [(memory, member) for memory in memories for member in memory.members if member.who == seat.who]
    under_way = [(memory, member) for memory, member in mine if member.issued > member.completed]
    wait = page.text() if page is not None and page.wait()[0] else ""
    rank = RankStatus(
        seat.rank,
        seat.who.pid,
        "stopped" if stopped(seat.who) else "",
        pending=sum(member.issued - member.completed for _, member in under_way),
        place=wait.rpartition(", at ")[2] if wait else "",
        words=next((member.exit_note for _, member in mine if member.state == GAVE_UP), ""),
        **_on_gpus(mine),
    )
    if rank.words:
        return replace(rank, state=rank.state or "given up")
    message = _MESSAGE.match(wait)
    if message is not None and page is not None:
        return replace(
            rank,
            state=rank.state or "waiting",
            call=f"{message[1]} {message[2]} {message[3]}",
            group=message[6],
            seconds=max(0.0, (now - page.since()) / 1e9),
            waits_for=(int(message[4]),) if message[4] else (),
        )
    memory, member = min(under_way, key=lambda pair: pair[1].since, default=max(mine, key=lambda pair: pair[1].since))
    seconds = max(0.0, (now - member.since) / 1e9) if member.since else -1.0
    away = not under_way or (not wait and seconds > _AWAY)
    return replace(
        rank,
        state=rank.state or ("elsewhere" if away else "waiting" if wait else "in call"),
        call=member.header.describe(memory.global_ranks) if member.header is not None else "",
        number=member.completed + bool(under_way),
        nbytes=member.header.nbytes if member.header is not None else 0,
        group=memory.label,
        seconds=seconds,
        waits_for=() if away else tuple(memory.waited_for(member)),
    )


def _on_gpus(mine: Sequence[tuple[SegmentView, Member]]) -> dict[str, Any]:
    """The last call on GPUs, in the group with most of them."""
    memory, member = max(mine, key=lambda pair: pair[1].device_issued)
    if member.device_header is None:
        return {}
    words = member.device_header.describe(memory.global_ranks)
    return {"gpu_call": words, "gpu_number": member.device_issued, "gpu_group": memory.label}


def remarks(ranks: Sequence[RankStatus], compared: int) -> tuple[str, ...]:
    """The sentences that a person would say first: who keeps others waiting, not who only passes a wait on."""
    by_rank = {rank.rank: rank for rank in ranks}
    waiting: dict[int, list[RankStatus]] = {}
    for rank in ranks:
        for name in rank.waits_for if rank.seconds >= _PATIENCE else ():
            waiting.setdefault(name, []).append(rank)
    roots = [name for name in sorted(waiting) if not (name in by_rank and by_rank[name].waits_for)]
    sentences = []
    for name in roots or sorted(waiting):
        who, plural = show_spans(sorted(waiter.rank for waiter in waiting[name])), "s" * (len(waiting[name]) > 1)
        longest = show_seconds(max(waiter.seconds for waiter in waiting[name]))
        sentences.append(f"rank {name} keeps rank{plural} {who} waiting for {longest}: it {_excuse(by_rank.get(name))}")
    for rank in ranks:
        if rank.rank not in waiting and rank.state in ("stopped", "dead", "given up"):
            sentences.append(f"rank {rank.rank} {_excuse(rank)}")
        if rank.straggler and not waiting:
            sentences.append(
                f"rank {rank.rank} comes last: {show_seconds(rank.late)} behind the first rank on average, "
                f"over the last {compared} calls"
            )
    return tuple(sentences)


def _excuse(rank: RankStatus | None) -> str:
    """The present activity of a rank that others wait for."""
    if rank is None:
        return "is not known here"
    after = f", after call no. {rank.number} {rank.call}" if rank.number else ""
    match rank.state:
        case "stopped":
            return "is stopped, by a signal or in a debugger"
        case "dead":
            return f"is dead: {rank.words}"
        case "given up":
            return f"has given its group up: {rank.words}"
        case "left" | "absent":
            return rank.words
        case "elsewhere":
            return f"is outside unisono{after}"
        case _:
            others = show_spans(sorted(rank.waits_for))
            return f"is in {rank.call}" + (
                f" and waits for rank{'s' * (len(rank.waits_for) > 1)} {others}" if others else ""
            )


def _command(pid: int) -> str:
    """The command line of a job: that of its first rank, or of the program that forked the rank."""
    words = _arguments(pid)
    while any("multiprocessing" in word for word in words) and (parent := _parent(pid)) > 1:
        pid, words = parent, _arguments(parent)
    return " ".join([os.path.basename(words[0]), *words[1:]]) if words else "?"


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode("utf-8", "replace").split("\0")
    except OSError:
        return []


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _line(pid: int) -> list[int]:
    """A process and those it descends from, but for the first process of all."""
    line = []
    while pid > 1:
        line.append(pid)
        pid = _parent(pid)
    return line

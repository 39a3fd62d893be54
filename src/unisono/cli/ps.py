"""`unisono ps`: what the ranks of the jobs that this host has a part in are doing, live."""

import json
import os
import pwd
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from unisono.cli.common import FOUND_EXIT, echo, is_terminal, show
from unisono.errors import UsageError
from unisono.units import show_nbytes, show_seconds, show_spans
from unisono.watch import status_page
from unisono.watch.other_hosts import with_other_hosts
from unisono.watch.status import GroupStatus, Job, RankStatus, snapshot

__all__ = ["ps"]

_LONG = 1.0  # s from which a wait is shown in colour
_BAR, _WIDE = 8, 100  # characters for the longest delay, shown from so many columns on
_STYLES = {"stopped": "bold red", "dead": "bold red", "given up": "red", "left": "dim", "absent": "yellow"}


def ps(
    pid: Annotated[int | None, typer.Argument(help="Only the job that this process is a rank of, or started.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once, as when the output is no terminal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print once, for programs.")] = False,
    stacks: Annotated[bool, typer.Option("--stacks", help="Print once, with every rank's Python stacks.")] = False,
    dump: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Let every rank write its flight record into DIR.")
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
) -> None:
    """Show what the ranks of your jobs on this host are in, who waits for whom, and who comes late.

    Of a job over several hosts the ranks of all hosts are shown; --stacks and --dump reach those of this one.

    It reads what the ranks write anyway: no job is disturbed, and a job that hangs can be looked at. Ctrl-C ends it.
    Exit code 1 if there is no job. Examples:

        unisono ps

        unisono ps --stacks

        unisono ps --dump record && python -m torch.distributed.flight_recorder.fr_trace record
    """
    if not 0.05 <= interval <= 3600:
        raise UsageError(f"--interval is {interval:g}, expected 0.05 to 3600 seconds")
    if dump is not None:
        _dump(snapshot(pid), dump.absolute(), pid)
    elif is_terminal(sys.stdout) and not (once or as_json or stacks):
        _follow(pid, interval)
    else:
        _print(list(map(with_other_hosts, snapshot(pid))), pid, as_json, stacks)


def _follow(pid: int | None, interval: float) -> None:
    """Shows the jobs until Ctrl-C."""
    try:
        with Live(screen=True, auto_refresh=False) as live:
            while True:
                jobs = list(map(with_other_hosts, snapshot(pid)))
                live.update(_screen(jobs, pid, live.console.width), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        return


def _print(jobs: Sequence[Job], pid: int | None, as_json: bool, stacks: bool) -> None:
    answers = [status_page.stacks(job.identities) if stacks else {} for job in jobs]
    if as_json and jobs:
        echo(json.dumps([_plain(job, found) for job, found in zip(jobs, answers, strict=True)], indent=2))
    for job, found in zip(jobs, answers, strict=True) if not as_json else ():
        console = Console(highlight=False)
        show(console, _job(job, console.width))
        for rank, stack in found.items():
            echo(f"\nrank {rank}\n{stack}\n")
    if not jobs:
        echo("[]" if as_json else _nothing(pid))
        raise typer.Exit(FOUND_EXIT)


def _plain(job: Job, stacks: dict[int, str]) -> dict[str, object]:
    """A job for `json`: the fields of `Job`, with each rank's stack if it was asked for."""
    plain = asdict(job)
    plain.pop("identities")
    for rank in plain["ranks"]:
        if stacks:
            rank["stacks"] = stacks.get(rank["rank"], "")
    return plain


def _dump(jobs: Sequence[Job], folder: Path, pid: int | None) -> None:
    if not jobs:
        echo(_nothing(pid))
        raise typer.Exit(FOUND_EXIT)
    if len(jobs) > 1:
        pids = ", ".join(str(job.pid) for job in jobs)
        raise UsageError(f"--dump takes one job, but there are {len(jobs)}: name one by a pid ({pids})")
    answers = status_page.records(jobs[0].identities, str(folder))
    for rank, answer in answers.items():
        echo(f"rank {rank}: {answer.removeprefix('! ')}" if answer.startswith("! ") else f"rank {rank} wrote {answer}")
    if any(answer.startswith("! ") for answer in answers.values()):
        raise typer.Exit(FOUND_EXIT)


def _nothing(pid: int | None) -> str:
    whose = "of yours" if pid is None else f"that process {pid} is a rank of or started"
    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return (
        f"no job {whose} runs on unisono on this host. Only jobs of the same user (you are {user}) and in the same "
        "container can be seen."
    )


def _screen(jobs: Sequence[Job], pid: int | None, width: int) -> RenderableType:
    clock = Text(time.strftime("unisono ps   %H:%M:%S   Ctrl-C ends"), "dim")
    content = [_job(job, width) for job in jobs] or [Padding(Text(_nothing(pid)), (1, 0))]
    return Group(clock, Text(), *content)


def _job(job: Job, width: int) -> RenderableType:
    here = sum(rank.pid > 0 for rank in job.ranks)
    size = f"{len(job.ranks)} ranks" if here == len(job.ranks) else f"{here} of {len(job.ranks)} ranks"
    title = Text.assemble((job.command, "bold"), ("   ", ""), (f"{size}, up {_duration(job.seconds)}", "dim"))
    title.no_wrap, title.overflow = True, "ellipsis"
    parts: list[RenderableType] = [
        title,
        Text(),
        _ranks(job.ranks, _BAR if width >= _WIDE else 0),
        Text(),
        _groups(job.groups),
    ]
    if job.remarks:
        remarks = Table.grid(padding=(0, 1))
        for remark in job.remarks:
            remarks.add_row(Text(" ●", "yellow"), remark)
        parts += [Text(), remarks]
    return Group(*parts, Text())


def _ranks(ranks: Sequence[RankStatus], bar: int) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", expand=False)
    table.add_column("rank", justify="right", no_wrap=True)
    over_hosts = any(rank.host for rank in ranks)
    if over_hosts:
        table.add_column("host", no_wrap=True)
    table.add_column("pid", justify="right", no_wrap=True)
    table.add_column("in", overflow="ellipsis")
    for name in ("bytes", "call no.", "for"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("behind", no_wrap=True, min_width=bar + 8)
    most = max((rank.late for rank in ranks), default=0.0)
    for rank in ranks:
        alive = rank.state in ("in call", "waiting", "elsewhere", "stopped")
        table.add_row(
            str(rank.rank),
            *([rank.host] if over_hosts else []),
            str(rank.pid or "-"),
            _one_line_each(_doing(rank)),
            show_nbytes(rank.nbytes) if rank.nbytes and alive else "",
            f"{rank.number:,}" if rank.number else "",
            _since(rank),
            _behind(rank, most, bar),
        )
    return table


def _doing(rank: RankStatus) -> Text:
    """The call of a rank, below it what it waits for and where, and its last call on GPUs."""
    text = _on_cpu(rank)
    if rank.gpu_number:
        where = "" if rank.gpu_group == "the default group" else f"  {rank.gpu_group}"
        text.append(f"\non GPUs, no. {rank.gpu_number:,}: {rank.gpu_call}{where}", "dim")
    return text


def _on_cpu(rank: RankStatus) -> Text:
    if rank.state in ("dead", "given up", "left", "absent"):
        text = Text(f"{rank.state}: {rank.words}" if rank.state in ("dead", "given up") else rank.words)
        text.stylize(_STYLES[rank.state])
        return text
    if rank.state == "elsewhere":
        more = [f"last {rank.call}"] if rank.call and not rank.pending else []
        more += [f"{rank.pending} under way: {rank.call}"] if rank.pending else []
        return Text.assemble("outside unisono", (f"  {', '.join(more)}", "dim"))
    text = Text("stopped  ", _STYLES["stopped"]) if rank.state == "stopped" else Text()
    text.append(rank.call or "between calls")
    if rank.group != "the default group" and rank.number:
        text.append(f"  {rank.group}", "dim")
    if rank.seconds >= _LONG and rank.waits_for:
        plural = "s" * (len(rank.waits_for) > 1)
        text.append(f"\nwaits for rank{plural} {show_spans(sorted(rank.waits_for))}", "yellow")
        text.append(f"  {_place(rank.place)}" if rank.place else "", "dim")
    return text


def _one_line_each(text: Text) -> Text:
    """Lines that are cut where there is no room, not wrapped."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _place(place: str) -> str:
    """A call site with its file shortened to its name."""
    file, colon, rest = place.partition(":")
    return f"{os.path.basename(file)}{colon}{rest}"


def _since(rank: RankStatus) -> Text:
    if rank.seconds < 0:
        return Text("-", "dim")
    waits = rank.state in ("waiting", "in call", "stopped") and rank.seconds >= _LONG
    return Text(_duration(rank.seconds), "yellow" if waits else "")


def _behind(rank: RankStatus, most: float, width: int) -> Text:
    """The mean delay, as a number and a bar relative to the longest."""
    if not most or rank.state in ("left", "absent", "dead"):
        return Text()
    style = "yellow" if rank.straggler else "dim"
    bar = "━" * round(width * rank.late / most)
    return Text.assemble((f"{show_seconds(rank.late):>7} ", style if rank.straggler else ""), (bar, style))


def _groups(groups: Sequence[GroupStatus]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("group")
    table.add_column("ranks")
    table.add_column("calls done", justify="right")
    table.add_column("per second", justify="right")
    for group in groups:
        pace = f"{group.per_second:,.0f}" if group.per_second >= 10 else f"{group.per_second:.1f}"
        label = group.label.removesuffix(f" {list(group.ranks)}")
        table.add_row(
            label, show_spans(sorted(group.ranks)), f"{group.completed:,}", pace if group.per_second else "idle"
        )
    return table


def _duration(seconds: float) -> str:
    """Short times with three digits, long ones in minutes and hours."""
    if seconds < 60:
        return show_seconds(seconds) if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"

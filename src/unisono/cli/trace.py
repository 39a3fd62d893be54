"""`unisono trace`: run a program and show where its communication time goes."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from unisono.bench.bound import bound_nbytes
from unisono.bench.launch import launch
from unisono.bench.result import Rates, Row
from unisono.bench.settings import Settings
from unisono.cli.schedules import say
from unisono.errors import UsageError
from unisono.trace.arm import COMPUTE, FOLDER
from unisono.trace.chrome import write_trace
from unisono.trace.page import report_page
from unisono.trace.record import RankRecord, read
from unisono.trace.summary import Bound, summarize
from unisono.units import show_nbytes

__all__ = ["trace"]

_LARGEST = 64 << 20


def trace(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The program with its arguments.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where the results go.")] = Path(
        "unisono-trace"
    ),
    compute: Annotated[
        bool, typer.Option("--compute", help="With torch.profiler's events; for short runs, they are many.")
    ] = False,
    bound: Annotated[bool, typer.Option(help="Measure the machine afterwards, for the share of the bound.")] = True,
) -> None:
    """Run a program on unisono and write a trace of every call, and a page that sums it up.

    The program is not changed; it may start its ranks by torchrun, multiprocessing or anything else on this host. The
    exit code is the program's own. Examples:

        unisono trace -- torchrun --nproc-per-node 4 train.py

        unisono trace --compute -- unisono train --steps 20
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UsageError(f"cannot make the directory {out}: {problem.strerror}") from None
    with TemporaryDirectory(prefix="unisono-trace-") as folder:
        code = _run(command, folder, compute)
        records = read(Path(folder))
        _report(records, out, _rates(records) if bound else None)
    raise typer.Exit(code)


def _run(command: list[str], folder: str, compute: bool) -> int:
    """The program's exit code; after Ctrl-C, which reaches the program too, that of an interrupt."""
    environment = {**os.environ, FOLDER: folder, COMPUTE: "1" if compute else "0"}
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as problem:
        raise UsageError(f"cannot run {command[0]}: {problem.strerror}") from None
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:
            continue
    return code if code >= 0 else 128 - code


def _rates(records: list[RankRecord]) -> Rates:
    """How fast as many ranks copy here."""
    found: list[Rates] = []

    def hear(news: Rates | Row) -> None:
        if isinstance(news, Rates):
            found.append(news)

    launch(Settings(collectives=(), ranks=len(records), least=1, most=_LARGEST), hear)
    return found[0]


def _report(records: list[RankRecord], out: Path, rates: Rates | None) -> None:
    summary = summarize(records, _bound(rates))
    trace_file, page_file = out / "trace.json", out / "report.html"
    words = ""
    if rates is not None:
        best = ", ".join(
            f"{rate / 1e9:.3g} GB/s at {show_nbytes(n)}" for n, rate in zip(rates.sizes, rates.copy, strict=True)
        )
        words = f"copies, each of the ranks at once, {best}"
    try:
        write_trace(trace_file, records)
        page_file.write_text(report_page(summary, trace_file.name, words), encoding="utf-8")
    except OSError as problem:
        raise UsageError(f"cannot write into {out}: {problem.strerror}") from None
    sys.stdout.flush()
    for line in summary.words():
        say(line)
    say(f"wrote {trace_file} (for https://ui.perfetto.dev) and {page_file}")


def _bound(rates: Rates | None) -> Bound:
    """The least time of a call; of operations whose size differs by rank it is not known."""
    known = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")

    def seconds(op: str, nbytes: int, ranks: int) -> float:
        if rates is None or op not in known or not nbytes:
            return 0.0
        return bound_nbytes(op, nbytes, ranks, "in") / 2 / ranks / rates.copies(nbytes)

    return seconds

"""`unisono trace`: run a program and show where its communication time goes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Annotated, NoReturn

import typer

from unisono.bench.launch import launch
from unisono.bench.result import Rates, Row
from unisono.bench.settings import Settings
from unisono.cli.common import echo, echo_words
from unisono.errors import UsageError, file_errors
from unisono.launch import ends_handled
from unisono.trace import COMPUTE, FOLDER
from unisono.trace.chrome import write_trace
from unisono.trace.page import report_page
from unisono.trace.record import RankRecord, read
from unisono.trace.summary import Bound, summarize
from unisono.units import show_nbytes

__all__ = ["trace"]

_LARGEST = 64 << 20
_TRACE, _PAGE, _LAUNCH = "trace.json", "report.html", "launch-"


def trace(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND", help="The program with its arguments.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where the results go.")] = Path(
        "unisono-trace"
    ),
    compute: Annotated[
        bool, typer.Option("--compute", help="With torch.profiler's events; for short runs, they are many.")
    ] = False,
    bound: Annotated[bool, typer.Option(help="Measure the machine afterwards, for the share of the bound.")] = True,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Run nothing: report what UNISONO_TRACE=DIR has collected."),
    ] = None,
) -> None:
    """Run a program on unisono and write a trace of every call, and a page that sums it up.

    The program is not changed; it may start its ranks by torchrun, multiprocessing or anything else on this host, and
    its exit code is this command's. Where the command line cannot be changed, UNISONO_TRACE=DIR in the environment
    collects, and --from DIR reports. Examples:

        unisono trace -- torchrun --nproc-per-node 4 train.py

        unisono trace --compute -- unisono train --steps 20

        unisono trace --from collected
    """
    if (source is None) == (not command):
        raise UsageError("give a program to run after --, or --from DIR with what UNISONO_TRACE=DIR has collected")
    launches = read(source) if source is not None else []
    with _results(out):
        if command:
            _run(command, out, compute, bound)
        _clear(out)
        _report_all(launches, out, bound)


def _run(command: list[str], out: Path, compute: bool, bound: bool) -> NoReturn:
    """Trace a program, and exit with its code."""
    with TemporaryDirectory(prefix="unisono-trace-") as folder, _terminable() as program:
        code = program.run(command, {**os.environ, FOLDER: folder, COMPUTE: "1" if compute else "0"})
        _clear(out)
        try:
            launches = read(Path(folder))
        except UsageError as problem:
            if code == 0:
                raise
            sys.stderr.write(f"unisono: {problem}\n")
            raise typer.Exit(code) from None
        _report_all(launches, out, bound)
    raise typer.Exit(code)


@contextmanager
def _results(out: Path) -> Iterator[None]:
    """The directory of the results; if it is made for them and stays empty, it is removed at the end."""
    there = out.exists()
    with file_errors(f"make the directory {out}"):
        out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if not there:
            with suppress(OSError):  # there are results in it
                out.rmdir()


class _Program:
    """The traced program, which is told of a signal that ends this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._signal = 0

    def run(self, command: list[str], environment: dict[str, str]) -> int:
        """The exit code; after Ctrl-C, which reaches the program too, that of an interrupt."""
        with file_errors(f"run {command[0]}"):
            self._process = subprocess.Popen(command, env=environment)
        if self._signal:
            self._process.send_signal(self._signal)
        while True:
            try:
                code = self._process.wait()
                break
            except KeyboardInterrupt:
                continue
        return code if code >= 0 else 128 - code

    def terminate(self, number: int, frame: FrameType | None) -> None:
        """Pass the signal on; once the program has ended, end this process through its `finally` clauses."""
        self._signal = number
        if self._process is not None:
            if self._process.returncode is not None:
                raise SystemExit(128 + number)
            self._process.send_signal(number)


@contextmanager
def _terminable() -> Iterator[_Program]:
    """A program to run; SIGTERM and SIGHUP reach it meanwhile, and afterwards end this process as `sys.exit` does."""
    program = _Program()
    with ends_handled(program.terminate):
        yield program


def _clear(out: Path) -> None:
    """Results of an earlier run are not to be taken for those of this one."""
    for folder in (out, *out.glob(f"{_LAUNCH}*")):
        with suppress(OSError):
            for name in (_TRACE, _PAGE):
                (folder / name).unlink(missing_ok=True)
            if folder != out:
                folder.rmdir()


@cache
def _rates(ranks: int) -> Rates:
    """The rate at which as many ranks copy here."""
    found: list[Rates] = []

    def receive(news: Rates | Row) -> None:
        if isinstance(news, Rates):
            found.append(news)

    launch(Settings(collectives=(), ranks=ranks, least=1, most=_LARGEST), receive)
    return found[0]


def _report_all(launches: list[list[RankRecord]], out: Path, bound: bool) -> None:
    """Each launch of ranks by itself, in a folder of its own if there are several."""
    sys.stdout.flush()
    for number, records in enumerate(launches, 1):
        folder = out
        if len(launches) > 1:
            folder = out / f"{_LAUNCH}{number}"
            echo(f"launch {number} of {len(launches)}:")
        _report(records, folder, _rates(len(records)) if bound else None)


def _report(records: list[RankRecord], out: Path, rates: Rates | None) -> None:
    summary = summarize(records, _bound(rates))
    trace_file, page_file = out / _TRACE, out / _PAGE
    words = ""
    if rates is not None:
        best = ", ".join(
            f"{rate / 1e9:.3g} GB/s at {show_nbytes(n)}" for n, rate in zip(rates.sizes, rates.copy, strict=True)
        )
        words = f"copies, each of the ranks at once, {best}"
    with file_errors(f"write into {out}"):
        out.mkdir(exist_ok=True)
        write_trace(trace_file, records)
        page_file.write_text(report_page(summary, trace_file.name, words), encoding="utf-8")
    for line in summary.words():
        echo_words(line)
    echo_words(f"wrote {trace_file} (for https://ui.perfetto.dev) and {page_file}")


def _bound(rates: Rates | None) -> Bound:
    """The least time of a call; of operations whose size differs by rank it is not known."""
    known = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce")

    def seconds(op: str, nbytes: int, ranks: int) -> float:
        if rates is None or op not in known or not nbytes:
            return 0.0
        return rates.bound(op, nbytes, ranks, "in")

    return seconds

"""`unisono bench`: what calls cost on CPUs or GPUs, in nccl-tests' shape, beside other backends."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from unisono.bench.compare import compare
from unisono.bench.launch import find_mpi, launch
from unisono.bench.plot import save_plot
from unisono.bench.result import Rates, Result, Row, this_machine
from unisono.bench.settings import (
    COLLECTIVES,
    DEVICES,
    DTYPES,
    IN_PLACE,
    MEMORIES,
    OPS,
    SYMM_MEM_WAYS,
    TIMINGS,
    Contender,
    Settings,
)
from unisono.bench.table import Table, describe_rates, footer, preamble
from unisono.cli.common import FOUND_EXIT, INTERRUPT_EXIT, check_writable, echo, echo_words, is_terminal, listed
from unisono.cli.predicted import predicted_lines
from unisono.errors import UsageError
from unisono.gpu.devices import count_gpus, describe_gpus
from unisono.launch import torchrun_rank
from unisono.units import parse_nbytes, show_nbytes

__all__ = ["bench", "conclude"]

DEFAULT = Settings()
_QUICK_BYTES, _QUICK_RUNS, _QUICK_SECONDS = "4K,64K,1M,16M", 5, 2.0
_SECONDS_ON_GPU = 4.0

_What = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="COLLECTIVE",
        help=f"{', '.join(COLLECTIVES)}, or all; or the word compare and two files of --json.",
        show_default="all_reduce",
    ),
]
_Ranks = Annotated[
    int | None,
    typer.Option("--ranks", "-n", help="Processes; under torchrun, its number.", show_default="2; GPUs: all"),
]
_Least = Annotated[str, typer.Option("--min-bytes", "-b", metavar="SIZE", help="Smallest size: 8, 64K, 1G.")]
_Most = Annotated[str, typer.Option("--max-bytes", "-e", metavar="SIZE", help="Largest size.")]
_Factor = Annotated[float, typer.Option("--factor", "-f", help="From one size to the next.")]
_Bytes = Annotated[str, typer.Option("--bytes", metavar="SIZES", help="These sizes, by comma, in place of -b to -e.")]
_Op = Annotated[str, typer.Option("--op", "-o", help=f"Reduction: {', '.join(OPS)}.")]
_Dtype = Annotated[str, typer.Option("--dtype", "-d", help=f"{', '.join(DTYPES)}.")]
_Root = Annotated[int, typer.Option("--root", "-r", help="Root of broadcast, reduce, gather, scatter.")]
_InPlace = Annotated[
    bool | None, typer.Option("--in-place/--out-of-place", help="Input and output.", show_default="as torch's call")
]
_Backend = Annotated[
    str,
    typer.Option(
        help="Whose calls: unisono, gloo, or mpi: MPICH or Open MPI, through mpi4py; on GPUs unisono, nccl, or "
        "symm_mem: torch's operations on symmetric memory."
    ),
]
_Against = Annotated[
    str, typer.Option(metavar="BACKENDS", help="As --backend, by comma; measured in the same processes, taking turns.")
]
_Algorithm = Annotated[
    str,
    typer.Option(metavar="NAMES", help="Ways of unisono, by comma: algorithms; default; persistent."),
]
_Async = Annotated[bool, typer.Option("--async", help="async_op=True, then wait.")]
_Memory = Annotated[str, typer.Option(help=f"Tensors: {' or '.join(MEMORIES)} (unisono.empty).")]
_Device = Annotated[str, typer.Option(help=f"Of the tensors: {' or '.join(DEVICES)}, a GPU for each rank.")]
_Timing = Annotated[
    str,
    typer.Option(
        metavar="WAYS",
        help="On GPUs, by comma: graph: replays, calls back to back; between: other kernels; eager: the host's time; "
        "async: with async_op=True and wait.",
        show_default="all of them",
    ),
]
_Quick = Annotated[bool, typer.Option("--quick", help=f"{_QUICK_BYTES} alone, 5 runs, 2 s for a collective.")]
_Pin = Annotated[bool, typer.Option("--pin", help="Each rank on a core of its own, if they fit.")]
_Runs = Annotated[
    int | None,
    typer.Option(help="Times each size is measured; shown are median and spread.", show_default=str(DEFAULT.runs)),
]
_WarmUp = Annotated[int, typer.Option(help="Calls before.")]
_Seconds = Annotated[
    float | None,
    typer.Option(
        help="About what a collective shall take; slow calls take longer.", show_default=f"{DEFAULT.seconds:g}; GPUs: 4"
    ),
]
_Check = Annotated[bool, typer.Option(help="Compare results with what must come out.")]
_Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write this, for `compare`.")]
_Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Also draw busbw and latency by size.")]


def bench(
    what: _What = None,
    ranks: _Ranks = None,
    least: _Least = "8",
    most: _Most = "256M",
    factor: _Factor = DEFAULT.factor,
    nbytes: _Bytes = "",
    op: _Op = DEFAULT.op,
    dtype: _Dtype = DEFAULT.dtype,
    root: _Root = DEFAULT.root,
    in_place: _InPlace = None,
    backend: _Backend = DEFAULT.contenders[0].backend,
    against: _Against = "",
    algorithm: _Algorithm = "",
    asynchronous: _Async = DEFAULT.asynchronous,
    memory: _Memory = DEFAULT.memory,
    pin: _Pin = DEFAULT.pin,
    device: _Device = DEFAULT.device,
    timing: _Timing = "",
    quick: _Quick = False,
    runs: _Runs = None,
    warm_up: _WarmUp = DEFAULT.warm_up,
    seconds: _Seconds = None,
    check: _Check = DEFAULT.check,
    json: _Json = None,
    plot: _Plot = None,
) -> None:
    """Measure collectives: time, bandwidth, share of the machine's bound; every result is checked.

    Ctrl-C prints what there is. Exit code 1 if a result was wrong. Examples:

        unisono bench all_reduce -n 2 --pin --against gloo --plot all_reduce.png

        unisono bench all -b 4 -e 1M -f 8 --pin --against gloo,mpi

        unisono bench all -b 4K -e 1M -f 4 --json before.json

        unisono bench compare before.json after.json

        unisono bench all --device cuda -d bfloat16 --against nccl,symm_mem --json gpus.json

        torchrun --nproc-per-node 4 -m unisono.cli bench all_gather -e 16M
    """
    if what and what[0] == "compare":
        _compare(what[1:])
        return
    rank, given_world_size = torchrun_rank(ranks)
    place = "" if in_place is None else "in" if in_place else "out"
    settings = Settings(
        **_collectives(what or list(DEFAULT.collectives), place, device),
        **_extent(device, quick, nbytes, timing, runs, seconds),
        ranks=DEFAULT.ranks if given_world_size is None else given_world_size,
        least=parse_nbytes(least), most=parse_nbytes(most), contenders=_contenders(backend, algorithm, against),
        place=place, factor=factor, op=op, dtype=dtype, root=root, asynchronous=asynchronous, memory=memory, pin=pin,
        warm_up=warm_up, check=check,
    )  # fmt: skip
    settings.validate()
    if device == "cuda":
        (settings := replace(settings, ranks=count_gpus(given_world_size))).validate()
    _run(settings, rank, json, plot)


def _extent(
    device: str, quick: bool, nbytes: str, timing: str, runs: int | None, seconds: float | None
) -> dict[str, Any]:
    """How much is measured, and for how long."""
    on_gpu = device == "cuda"
    usual = _QUICK_SECONDS if quick else _SECONDS_ON_GPU if on_gpu else DEFAULT.seconds
    return {
        "device": device,
        "timings": tuple(listed(timing)) or (TIMINGS if on_gpu else DEFAULT.timings),
        "listed": tuple(map(parse_nbytes, listed(nbytes or (_QUICK_BYTES if quick else "")))),
        "runs": (_QUICK_RUNS if quick else DEFAULT.runs) if runs is None else runs,
        "seconds": usual if seconds is None else seconds,
    }


def _collectives(names: list[str], place: str, device: str) -> dict[str, Any]:
    """Those that are named; of all, those that have the form that is asked for, and those that are left out."""
    of_device = [name for name in COLLECTIVES if device == "cpu" or name != "barrier"]
    able = [name for name in of_device if place != "in" or name in IN_PLACE]
    named = dict.fromkeys(each for name in names for each in (able if name == "all" else [name]))
    left_out = [name for name in of_device if "all" in names and name not in named]
    return {"collectives": tuple(named), "left_out": tuple(left_out)}


def _compare(files: list[str]) -> None:
    if len(files) != 2:
        raise UsageError(f"compare takes two files, the earlier result and the later one, got {len(files)}")
    before, after = (Result.load(Path(file)) for file in files)
    for text in compare(before, after):
        echo(text)


def _contenders(backend: str, algorithm: str, against: str) -> tuple[Contender, ...]:
    chosen = listed(algorithm)
    if chosen and backend != "unisono":
        raise UsageError(f"--algorithm is for unisono: --backend {backend} chooses its own")
    mine = [Contender(backend, "" if name == "default" else name) for name in chosen or ["default"]]
    others = [each for name in listed(against) for each in _ways(name)]
    return (*(_ways(backend) if backend == "symm_mem" else mine), *others)


def _ways(backend: str) -> list[Contender]:
    """The contenders that a backend's name stands for."""
    return [Contender(backend, way) for way in (SYMM_MEM_WAYS if backend == "symm_mem" else [""])]


def _run(settings: Settings, rank: int | None, json: Path | None, plot: Path | None) -> None:
    """Launches local ranks (rank None) or is one; only the launcher and rank 0 show and write anything."""
    for path in (json, plot):
        check_writable(path)
    gpu = describe_gpus(settings.ranks) if settings.device == "cuda" else ""
    machine = this_machine(find_mpi().words if settings.by_mpiexec else "", gpu)
    if rank:
        _measure(settings, rank, lambda news: None)
        return
    plain = {"collectives": list(settings.collectives), "contenders": [each.name for each in settings.contenders]}
    result, code = Result(vars(settings) | plain, machine), 0
    with _Screen(result, settings, json) as screen:
        try:
            _measure(settings, rank, screen.report)
            result.complete = True
        except KeyboardInterrupt:
            code = INTERRUPT_EXIT
        except SystemExit as end:  # SIGTERM, or the end of the terminal, to which nothing can be said any more
            code = int(end.code or 0)
        if json is not None and result.rows:
            result.save(json)
    predictable = not settings.asynchronous and settings.memory != "shared" and settings.device == "cpu"
    for text in [*footer(result), *(predicted_lines(result.rows, settings.ranks) if predictable else [])]:
        echo_words(text)
    conclude(result, json, plot, save_plot, code)


def conclude(
    result: Result, json: Path | None, plot: Path | None, draw: Callable[[Path, Result], None], code: int
) -> None:
    """Says what was saved, draws what is asked for; exits with `code`, or because a result was wrong."""
    if json is not None and result.rows:
        echo(f"# wrote {json}")
    if plot is not None and result.rows:
        draw(plot, result)
        echo(f"# wrote {plot}")
    if code or any(row.wrong for row in result.rows):
        raise typer.Exit(code or FOUND_EXIT)


def _measure(settings: Settings, rank: int | None, report: Callable[[Rates | Row], None]) -> None:
    if rank is None:
        launch(settings, report)
        return
    from unisono.bench.measure import run_rank

    run_rank(settings, rank, "env://", report)


class _Screen:
    """Rows as they come, below them a progress bar if somebody looks on. Of GPUs ``json`` has them at once as well."""

    def __init__(self, result: Result, settings: Settings, json: Path | None) -> None:
        self.result, self.settings, self.json = result, settings, json
        self.pending: list[Row] = []
        self.kind = "", ""
        width = get_terminal_size().columns if is_terminal(sys.stdout) else None
        self.table = Table([contender.name for contender in settings.contenders], width, settings.device == "cuda")
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not is_terminal(sys.stderr),
            redirect_stdout=is_terminal(sys.stdout),
        )
        total = sum(len(settings.sizes(name)) for name in settings.collectives) * len(settings.timings)
        self.task = self.bar.add_task("starting the ranks", total=total)

    def __enter__(self) -> Self:
        for text in preamble(self.result, self.settings):
            echo_words(text)
        self.bar.start()
        return self

    def __exit__(self, *details: object) -> None:
        self.bar.stop()

    def report(self, news: Rates | Row) -> None:
        """Takes in what the ranks have found; a line is shown once all contenders have their row."""
        if isinstance(news, Rates):
            self.result.rates = news
            echo_words(describe_rates(news))
            return
        self.result.rows.append(news)
        self.pending.append(news)
        if len(self.pending) < len(self.settings.contenders):
            return
        subject, *rivals = self.pending
        self.pending = []
        if (subject.collective, subject.timing) != self.kind:
            self.kind = subject.collective, subject.timing
            for text in self.table.heading(subject):
                echo(text)
        echo(self.table.line(subject, rivals))
        if self.json is not None and self.settings.device == "cuda":
            self.result.save(self.json)  # a record that takes minutes shall not be lost with its last row
        size = show_nbytes(subject.nbytes) if subject.nbytes else ""
        self.bar.update(self.task, advance=1, description=f"{subject.collective} {size}")

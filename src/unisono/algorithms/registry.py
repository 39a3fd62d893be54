"""The registry: a name and a collective give a builder, its steps and its bytes per rank.

Adding an algorithm is one function in one file, here or anywhere that is imported:

    @register_algorithm("relay", "broadcast", steps="n-1", nbytes_per_rank="1")
    def broadcast(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
        "Each rank hands the whole to the next."
        ...

`chunks` is the number of pieces per block: algorithms that pipeline send them one by one, others together. What
depends on a root has the parameter `root`; every further parameter is an option. An all_reduce is also a barrier.
"""

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import Literal, overload

from unisono.algorithms.formula import Formula
from unisono.algorithms.pipelines import PIPELINE, SCHEDULES, build_pipeline
from unisono.errors import UsageError, check_known
from unisono.schedule import COLLECTIVES, PipelineSchedule, Schedule

__all__ = ["AlgorithmInfo", "algorithm_info", "build", "list_algorithms", "names", "register_algorithm"]

Builder = Callable[..., Schedule]

_registered: dict[tuple[str, str], "AlgorithmInfo"] = {}


@dataclass(frozen=True)
class AlgorithmInfo:
    """One algorithm for one collective, and what it costs with its default options.

    `steps` counts steps; `nbytes_per_rank` is the share of the collective's bytes that the busiest rank sends.
    """

    name: str
    collective: str
    builder: Builder
    steps: Formula
    nbytes_per_rank: Formula
    summary: str
    options: tuple[str, ...]
    rooted: bool
    simulation_only: bool

    def check(self, world_size: int, root: int, chunks: int, options: dict[str, object]) -> None:
        """Raises UsageError if a number is out of range or an option unknown."""
        called = f"{self.name} {self.collective}"
        for what, value in (("world_size", world_size), ("chunks", chunks)):
            if value < 1:
                raise UsageError(f"{called}: {what} must be at least 1, got {value}")
        if not 0 <= root < world_size:
            raise UsageError(f"{called}: there is no rank {root} among {world_size} to be root")
        if root and not self.rooted:
            raise UsageError(f"{called} has no root, got root={root}")
        unknown = sorted(options.keys() - set(self.options))
        if unknown:
            known = ", ".join(self.options) or "none"
            raise UsageError(f"{called} has no option {', '.join(unknown)} (it has: {known})")


def register_algorithm(
    name: str, collective: str, *, steps: str, nbytes_per_rank: str, simulation_only: bool = False
) -> Callable[[Builder], Builder]:
    """Register the decorated function as algorithm `name` for `collective`; the function itself stays as it is.

    The two formulas are in n (ranks), k (chunks) and further names, see `Formula`. Raises UsageError if the
    collective is unknown or the pair already taken by another function.
    """
    if collective not in COLLECTIVES:
        raise UsageError(
            f"algorithm {name}: unknown collective {collective!r}, expected one of {', '.join(COLLECTIVES)}"
        )

    def register(builder: Builder) -> Builder:
        taken = _registered.get((name, collective))
        if taken is not None and taken.builder.__module__ != builder.__module__:
            raise UsageError(f"algorithm {name} {collective} is already taken by {taken.builder.__module__}")
        parameters = inspect.signature(builder).parameters
        made = AlgorithmInfo(
            name,
            collective,
            builder,
            Formula(steps),
            Formula(nbytes_per_rank),
            summary=(inspect.getdoc(builder) or "").partition("\n")[0],
            options=tuple(p for p in parameters if p not in ("world_size", "root", "chunks")),
            rooted="root" in parameters,
            simulation_only=simulation_only,
        )
        _registered[name, collective] = made
        if collective == "all_reduce":
            _registered.setdefault((name, "barrier"), _as_barrier(made))
        return builder

    return register


def _as_barrier(of: AlgorithmInfo) -> AlgorithmInfo:
    def barrier(world_size: int, chunks: int = 1, **options: object) -> Schedule:
        return of.builder(world_size, chunks=chunks, **options).as_barrier()

    barrier.__module__ = of.builder.__module__
    summary = f"The steps of {of.name} all_reduce, with nothing in them."
    nothing, only = Formula("0"), of.simulation_only
    return AlgorithmInfo(of.name, "barrier", barrier, of.steps, nothing, summary, of.options, False, only)


def algorithm_info(name: str, collective: str) -> AlgorithmInfo:
    """The algorithm of that name for that collective. Raises UsageError that lists what there is instead."""
    _load()
    if (name, collective) in _registered:
        return _registered[name, collective]
    check_known("collective", collective, COLLECTIVES)
    serves = sorted(c for n, c in _registered if n == name)
    if serves:
        raise UsageError(
            f"algorithm {name} has no {collective}: it does {', '.join(serves)}; "
            f"{collective} is done by {', '.join(names(collective))}"
        )
    hint = f'; {name} is a pipeline schedule: build("{name}", "{PIPELINE}", ...)' if name in SCHEDULES else ""
    raise UsageError(f"unknown algorithm {name!r}: {collective} is done by {', '.join(names(collective))}{hint}")


@overload
def build(  # type: ignore[overload-overlap]
    name: str,
    collective: Literal["pipeline"],
    world_size: int,
    *,
    microbatches: int = 8,
    stages_per_rank: int | None = None,
) -> PipelineSchedule: ...


@overload
def build(
    name: str, collective: str, world_size: int, root: int = 0, chunks: int = 1, **options: object
) -> Schedule: ...


def build(
    name: str, collective: str, world_size: int, root: int = 0, chunks: int = 1, **options: object
) -> Schedule | PipelineSchedule:
    """The schedule of an algorithm for a collective, or of a pipeline; the same arguments give the same object.

    Args:
        name: of an algorithm (`unisono list`), or of a pipeline schedule: gpipe, 1f1b, interleaved, zb-h1, zb-v.
        collective: what it does, e.g. "all_reduce"; "pipeline" for pipeline schedules.
        world_size: number of ranks.
        root: rank that broadcast, reduce, gather and scatter start or end at.
        chunks: pieces per block, for algorithms that pipeline.
        options: of the algorithm, e.g. `hosts="2x4"` (schedule/hosts.py); of a pipeline `microbatches` and
            `stages_per_rank`.

    Raises:
        UsageError: there is none of that name, a number is out of range, an option unknown, or the algorithm unfit.

    """
    if collective == PIPELINE:
        for what, value, usual in (("root", root, 0), ("chunks", chunks, 1)):
            if value != usual:
                raise UsageError(f"{name} is a pipeline schedule, which has no {what}, got {what}={value}")
        return build_pipeline(name, world_size, **options)  # type: ignore[arg-type]
    info = algorithm_info(name, collective)
    info.check(world_size, root, chunks, options)
    return _built(info, world_size, root, chunks, tuple((name, _frozen(options[name])) for name in sorted(options)))


def _frozen(value: object) -> object:
    """Lists as tuples, which have a hash."""
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


@lru_cache(maxsize=256)
def _built(
    info: AlgorithmInfo, world_size: int, root: int, chunks: int, options: tuple[tuple[str, object], ...]
) -> Schedule:
    rooted = {"root": root} if info.rooted else {}
    return info.builder(world_size, chunks=chunks, **rooted, **dict(options))


def names(collective: str | None = None) -> tuple[str, ...]:
    """Names of all algorithms, or of those that do one collective, sorted."""
    _load()
    return _names(tuple(_registered), collective)


@lru_cache(maxsize=32)
def _names(registered: tuple[tuple[str, str], ...], collective: str | None) -> tuple[str, ...]:
    return tuple(sorted({name for name, does in registered if collective in (None, does)}))


def list_algorithms(collective: str | None = None) -> list[AlgorithmInfo]:
    """Everything there is, or what does one collective, by collective (in the order of COLLECTIVES) and name."""
    _load()
    found = (info for info in _registered.values() if collective in (None, info.collective))
    return sorted(found, key=lambda info: (COLLECTIVES.index(info.collective), info.name))


@cache
def _load() -> None:
    """Once, import every file of this package, so that a new one needs no mention anywhere."""
    import unisono.algorithms as package

    for module in pkgutil.iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")

"""The registry: a name and a collective give a builder, its steps and its bytes per rank.

Adding an algorithm is one function in one file, here or anywhere that is imported:

    @algorithm("relay", "broadcast", steps="n-1", nbytes_per_rank="1")
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
from functools import cache
from importlib import import_module

from unisono.algorithms.formula import Formula
from unisono.errors import UsageError
from unisono.schedule import COLLECTIVES, Schedule

__all__ = ["Entry", "algorithm", "build", "entries", "entry", "names"]

Builder = Callable[..., Schedule]

_entries: dict[tuple[str, str], "Entry"] = {}


@dataclass(frozen=True)
class Entry:
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

    def build(self, world_size: int, root: int = 0, chunks: int = 1, **options: object) -> Schedule:
        """The schedule. Raises UsageError if a number is out of range, an option unknown, or the algorithm unfit."""
        for what, value in (("world_size", world_size), ("chunks", chunks)):
            if value < 1:
                raise UsageError(f"{self.name} {self.collective}: {what} must be at least 1, got {value}")
        if not 0 <= root < world_size:
            raise UsageError(f"{self.name} {self.collective}: there is no rank {root} among {world_size} to be root")
        if root and not self.rooted:
            raise UsageError(f"{self.name} {self.collective} has no root, got root={root}")
        unknown = sorted(options.keys() - set(self.options))
        if unknown:
            known = ", ".join(self.options) or "none"
            raise UsageError(f"{self.name} {self.collective} has no option {', '.join(unknown)} (it has: {known})")
        if self.rooted:
            options["root"] = root
        return self.builder(world_size, chunks=chunks, **options)


def algorithm(
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
        taken = _entries.get((name, collective))
        if taken is not None and taken.builder.__module__ != builder.__module__:
            raise UsageError(f"algorithm {name} {collective} is already taken by {taken.builder.__module__}")
        parameters = inspect.signature(builder).parameters
        options = tuple(p for p in parameters if p not in ("world_size", "root", "chunks"))
        summary = (inspect.getdoc(builder) or "").partition("\n")[0]
        made = Entry(
            name,
            collective,
            builder,
            Formula(steps),
            Formula(nbytes_per_rank),
            summary,
            options,
            "root" in parameters,
            simulation_only,
        )
        _entries[name, collective] = made
        if collective == "all_reduce":
            _entries.setdefault((name, "barrier"), _as_barrier(made))
        return builder

    return register


def _as_barrier(of: Entry) -> Entry:
    def barrier(world_size: int, chunks: int = 1, **options: object) -> Schedule:
        return of.builder(world_size, chunks=chunks, **options).as_barrier()

    barrier.__module__ = of.builder.__module__
    summary = f"The steps of {of.name} all_reduce, with nothing in them."
    return Entry(of.name, "barrier", barrier, of.steps, Formula("0"), summary, of.options, False, of.simulation_only)


def entry(name: str, collective: str) -> Entry:
    """The algorithm of that name for that collective. Raises UsageError that lists what there is instead."""
    _load()
    if (name, collective) in _entries:
        return _entries[name, collective]
    if collective not in COLLECTIVES:
        raise UsageError(f"unknown collective {collective!r}: expected one of {', '.join(COLLECTIVES)}")
    serves = sorted(c for n, c in _entries if n == name)
    if serves:
        raise UsageError(
            f"algorithm {name} has no {collective}: it does {', '.join(serves)}; "
            f"{collective} is done by {', '.join(names(collective))}"
        )
    raise UsageError(f"unknown algorithm {name!r}: {collective} is done by {', '.join(names(collective))}")


def build(name: str, collective: str, world_size: int, root: int = 0, chunks: int = 1, **options: object) -> Schedule:
    """The schedule of algorithm `name` for a collective. Raises UsageError that says what does not fit, and why."""
    return entry(name, collective).build(world_size, root, chunks, **options)


def names(collective: str | None = None) -> list[str]:
    """Names of all algorithms, or of those that do one collective, sorted."""
    return sorted({e.name for e in entries() if collective in (None, e.collective)})


def entries() -> list[Entry]:
    """Everything there is, by collective (in the order of COLLECTIVES) and name."""
    _load()
    return sorted(_entries.values(), key=lambda e: (COLLECTIVES.index(e.collective), e.name))


@cache
def _load() -> None:
    """Once, import every file of this package, so that a new one needs no mention anywhere."""
    import unisono.algorithms as package

    for module in pkgutil.iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")

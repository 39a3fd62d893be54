"""Options: what can be chosen, per block of code, per group, or by environment variable. Never imports torch.

    with unisono.algorithm("double_tree"): ...                     calls of this thread in the block
    new_group(..., pg_options=unisono.Options(algorithm="ring"))   calls of one group
    UNISONO_ALGORITHM=ring                                         calls of all groups
    UNISONO_ALGORITHM=all_reduce=ring,broadcast=chain              the same, by collective
    Options(select="measured"), UNISONO_SELECT=measured            the fastest that `unisono tune` has measured
    UNISONO_DETERMINISTIC=1                                        sums in rank order, whatever the algorithm
    UNISONO_PIN=1, or Options(pin=True)                            each rank keeps to cores of its own
    UNISONO_BETWEEN=mpi, or Options(between="mpi")                 MPI between hosts
    UNISONO_HOST_TIMEOUT=15, or Options(host_timeout=15.0)         seconds until a silent host is lost
    UNISONO_GPU_KERNELS=0                                          CUDA tensors go by NCCL alone

The nearest one counts. All ranks must choose alike: the choice is part of what the guard compares. An algorithm chosen
for a block must exist for every collective called in it; chosen for a group or by the environment it serves the
collectives that it has, and the others go their usual way.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property

from unisono.algorithms import algorithm_info, names
from unisono.errors import UsageError

__all__ = [
    "Options",
    "algorithm",
    "between_hosts",
    "chosen",
    "from_environment",
    "host_timeout",
    "kernels_wanted",
    "pinned",
]


HOST_TIMEOUT = 15.0
"""Seconds after which another host that does not answer is lost: a switch that restarts a port takes some."""
_ENGINES = ("gloo", "mpi")


@dataclass(frozen=True)
class Options:
    """Choices for a group; pass it as ``pg_options``.

    ``algorithm``: one name for every collective that has it, or a mapping of collective to name; None for what
    ``select`` chooses: ``default``, by the table that `unisono plan --default` shows, or ``measured``, for collectives
    of equal pieces and every size the fastest schedule that `unisono tune` has measured on this machine or, for what it
    has not measured, the one that the simulator finds fastest. ``deterministic``: the algorithm sums in rank order, bit
    for bit as the default does. ``chunks``: pieces per block, for algorithms that pipeline. ``strict``: collectives
    that the algorithm does not have are refused. ``pin``: given for the default group, its ranks keep to their share of
    the cores, where these suffice and no affinity is set. ``host_timeout``: seconds after which another host that does
    not answer is lost, at least 1. ``between``: what carries messages between hosts: ``gloo``, which is part of torch,
    or ``mpi``, by mpi4py, for ranks that mpiexec has started; all ranks must choose alike. Raises `UsageError` for a
    name that does not exist.
    """

    algorithm: str | Mapping[str, str] | None = None
    deterministic: bool = False
    chunks: int = 1
    strict: bool = False
    pin: bool = False
    select: str = "default"
    host_timeout: float = HOST_TIMEOUT
    between: str = "gloo"

    def __post_init__(self) -> None:
        if not self.host_timeout >= 1:
            raise UsageError(f"Options(host_timeout={self.host_timeout!r}): expected at least 1 second")
        if self.between not in _ENGINES:
            raise UsageError(f"Options(between={self.between!r}): expected 'gloo' or 'mpi'")
        if self.select not in ("default", "measured"):
            raise UsageError(f"Options(select={self.select!r}): expected 'default' or 'measured'")
        if isinstance(self.algorithm, str):
            if self.algorithm not in names():
                raise UsageError(f"unknown algorithm {self.algorithm!r}: there are {', '.join(names())}")
        elif self.algorithm is not None:
            for collective, name in self.algorithm.items():
                algorithm_info(name, collective)

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def key(self) -> tuple[object, ...]:
        """The key of these options in caches of calls."""
        named = self.algorithm
        names_ = named if named is None or isinstance(named, str) else tuple(sorted(named.items()))
        return names_, self.deterministic, self.chunks, self.strict

    def words_for(self, collective: str) -> str:
        """The choice for a collective as ranks compare and people read it: ``ring in 8 pieces in rank order``."""
        name = self.name_for(collective)
        if not name:
            return ""
        pieces = f" in {self.chunks} pieces" if self.chunks > 1 else ""
        return f"{name}{pieces}{' in rank order' if self.deterministic else ''}"

    def name_for(self, collective: str) -> str:
        """The algorithm for a collective, or nothing for the default path.

        Raises `UsageError` if the algorithm was chosen for a block and does not have the collective.
        """
        if self.algorithm is None:
            return ""
        if not isinstance(self.algorithm, str):
            return self.algorithm.get(collective, "")
        if self.strict:
            return algorithm_info(self.algorithm, collective).name
        return self.algorithm if self.algorithm in names(collective) else ""


_block: ContextVar[Options | None] = ContextVar("unisono_algorithm", default=None)


@contextmanager
def algorithm(name: str | None, *, deterministic: bool = False, chunks: int = 1) -> Iterator[None]:
    """Carries the collectives called in the block out by algorithm ``name`` (see `unisono list`); None: by default.

    Raises `UsageError` for a name that does not exist; a collective that the algorithm does not have, or a group that
    it does not fit, raises `UsageError` at the call, on all ranks.
    """
    token = _block.set(Options(name, deterministic, chunks, strict=True))
    try:
        yield
    finally:
        _block.reset(token)


def chosen(group: Options | None) -> Options | None:
    """The options that count for a call in a group with options ``group``; None if they name no algorithm."""
    options = _block.get() or group
    return options if options is not None and options.algorithm is not None else None


def pinned(group: Options | None) -> bool:
    """True if the ranks of a default group with these options keep to cores of their own."""
    wanted = _switched_on("UNISONO_PIN")
    return wanted or (group is not None and group.pin)


def host_timeout(group: Options | None) -> float:
    """Seconds after which a silent host is lost for a group with these options; the environment counts where set."""
    text = os.environ.get("UNISONO_HOST_TIMEOUT", "")
    try:
        found = float(text) if text else group.host_timeout if group is not None else HOST_TIMEOUT
    except ValueError:
        found = 0.0
    if not found >= 1:
        raise UsageError(f"UNISONO_HOST_TIMEOUT is {text!r}, expected a number of seconds, at least 1")
    return found


def between_hosts(group: Options | None) -> str:
    """What carries messages between the hosts of a group with these options; the environment counts where set."""
    found = os.environ.get("UNISONO_BETWEEN", "") or (group.between if group is not None else _ENGINES[0])
    if found not in _ENGINES:
        raise UsageError(f"UNISONO_BETWEEN is {found!r}, expected gloo or mpi")
    return found


def kernels_wanted() -> bool:
    """True unless ``UNISONO_GPU_KERNELS`` is 0."""
    return _switched_on("UNISONO_GPU_KERNELS", "1")


def _switched_on(name: str, unset: str = "") -> bool:
    text = os.environ.get(name, unset)
    if text not in ("", "0", "1"):
        raise UsageError(f"{name} is {text!r}, expected 0 or 1")
    return text == "1"


def from_environment() -> Options | None:
    """The options of the environment, or None. Raises `UsageError` for a value or a name that does not exist."""
    text, exact = os.environ.get("UNISONO_ALGORITHM", ""), _switched_on("UNISONO_DETERMINISTIC")
    how = os.environ.get("UNISONO_SELECT", "") or "default"
    if how not in ("default", "measured"):
        raise UsageError(f"UNISONO_SELECT is {how!r}, expected default or measured")
    if not text:
        return Options(deterministic=exact, select=how) if how == "measured" else None
    pairs = [part.partition("=") for part in text.split(",")]
    named = {collective.strip(): name.strip() for collective, _, name in pairs} if "=" in text else text.strip()
    try:
        return Options(named, exact)
    except UsageError as problem:
        raise UsageError(f"UNISONO_ALGORITHM is {text!r}: {problem}") from None

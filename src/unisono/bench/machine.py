"""The bound of the machine: how fast the ranks copy, and reduce, while all of them do it at once."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from unisono.bench.result import Rates
from unisono.bench.settings import REDUCING, Settings
from unisono.runtime.reduce import reducer

__all__ = ["limit_of", "measure_rates"]

_LEAST, _STEP = 64 << 10, 8
_BLOCK, _BLOCKS = 0.01, 3  # s of copying in one go, and how often
_MOSTLY, _LITTLE, _APART = 0.5, 0.05, 0.33


def measure_rates(settings: Settings, barrier: Callable[[], Any], all_numbers: Callable[[float], list[float]]) -> Rates:
    """Copies, and reductions of the settings' kind, at sizes from 64 KiB to the largest of the run.

    All ranks call this together; ``barrier`` starts them together, ``all_numbers`` gives every rank's number.
    """
    dtype = getattr(torch, settings.dtype)
    sizes = [_LEAST]
    while sizes[-1] < settings.largest:
        sizes.append(min(sizes[-1] * _STEP, settings.largest))
    source = torch.ones(sizes[-1] // dtype.itemsize, dtype=dtype)
    target = torch.ones_like(source)
    reducing = any(name in REDUCING for name in settings.collectives)
    combine = reducer(dtype, "SUM" if settings.op == "premul_sum" else settings.op.upper())
    copy, reduce = [], []
    for size in sizes:
        a, b = target[: size // dtype.itemsize], source[: size // dtype.itemsize]
        copy.append(size / _seconds(partial(a.copy_, b), barrier, all_numbers))
        reduce.append(size / _seconds(partial(combine, (a, b), a), barrier, all_numbers) if reducing else copy[-1])
    return Rates(tuple(sizes), tuple(copy), tuple(reduce))


def _seconds(run: Callable[[], Any], barrier: Callable[[], Any], all_numbers: Callable[[float], list[float]]) -> float:
    """Seconds per ``run`` while all ranks make it: from the first rank's start to the last one's end, median of blocks.

    Thus ranks that outnumber the cores count for what they get done in turn, not for what each does in its turn.
    """
    began = time.perf_counter()
    run()
    repeats = range(max(1, round(_BLOCK / max(all_numbers(time.perf_counter() - began)))))
    times = []
    for _ in range(_BLOCKS):
        barrier()
        began = time.monotonic()
        for _ in repeats:
            run()
        ended = time.monotonic()
        times.append((max(all_numbers(ended)) - min(all_numbers(began))) / len(repeats))
    return statistics.median(times)


def limit_of(collective: str, nbytes: int, ranks: int, seconds: float, fixed: float, skew: float, rates: Rates) -> str:
    """The part that takes most of the time.

    ``latency`` if a call on next to nothing (``fixed`` seconds) takes half as long, or what must be done takes a
    twentieth of that; ``skew`` if the ranks' own times of one call differ by a third of the longest (``skew``: that
    difference as a share); otherwise ``reduce`` or ``copy``, whichever takes longer for the least that must be done.
    """
    share = (ranks - 1) / ranks  # of the vector is what each rank has to reduce if all share the work
    reducing = share * nbytes / rates.reduces(nbytes) if collective in REDUCING else 0.0
    copying = rates.bound(collective, nbytes, ranks, "in")
    if fixed >= _MOSTLY * seconds or reducing + copying <= _LITTLE * fixed:
        return "latency"
    if skew >= _APART:
        return "skew"
    return "reduce" if reducing > copying else "copy"

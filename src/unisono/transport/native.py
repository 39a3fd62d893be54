"""Functions of the C library and the kernel, for compiled loops (runtime/compiled.py).

Needs numba. The loops are compiled with these inside, and cached: a change here changes them too.
"""

import platform
from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from unisono.transport.atomics import (
    copy_256,
    copy_256_past,
    fetch_add,
    inner,
    load_acquire64,
    load_seq_cst32,
    on_stack,
    pointer,
    settle,
    types,
)
from unisono.transport.futex import BACKOFF_NS, FUTEX_WAIT, FUTEX_WAKE, INT_MAX, NUMBERS, SLOW_YIELD_NS

__all__ = ["copy", "copy_past", "now", "pause", "sleep", "store", "wake"]

_NUMBER, _WAIT, _WAKE, _ALL = NUMBERS.get(platform.machine(), 0), FUTEX_WAIT, FUTEX_WAKE, INT_MAX
_SLOW_YIELD_NS, _BACKOFF_NS = SLOW_YIELD_NS, BACKOFF_NS
_PAST_CACHES = 32 << 20
_BY_BLOCKS = 4096 if platform.machine() == "x86_64" else _PAST_CACHES
_memcpy = types.ExternalFunction("memcpy", types.voidptr(types.voidptr, types.voidptr, types.intp))
_syscall = types.ExternalFunction("syscall", types.intp(*[types.intp] * 7))
_clock = types.ExternalFunction("clock_gettime", types.intc(types.intc, types.voidptr))
_yield = types.ExternalFunction("sched_yield", types.intc())


@inner
def copy(target: int, source: int, nbytes: int) -> None:
    """Copies ``nbytes``, none if that is negative, between addresses.

    From `_BY_BLOCKS` bytes to below `_PAST_CACHES` by vector registers: the C library has ``rep movsb`` copy that on
    x86-64, which takes up to three times as long on some CPUs, by how the addresses lie. What is longer it stores past
    the caches.
    """
    if _BY_BLOCKS <= nbytes < _PAST_CACHES:
        end = target + nbytes - nbytes % 256
        while target < end:
            copy_256(target, source)
            target += 256
            source += 256
        nbytes = nbytes % 256
    if nbytes > 0:
        _memcpy(pointer(target), pointer(source), nbytes)


@inner
def copy_past(target: int, source: int, nbytes: int) -> None:
    """Copies ``nbytes`` between addresses, whole lines of the target past the caches."""
    lead = min(-target & 63, nbytes)
    copy(target, source, lead)
    target, source, nbytes = target + lead, source + lead, nbytes - lead
    end = target + nbytes - nbytes % 256
    while target < end:
        copy_256_past(target, source)
        target += 256
        source += 256
    copy(target, source, nbytes % 256)
    settle()


@inner
def store(address: int, value: int) -> None:
    """Stores a 64-bit word; others may see it at any time."""
    carray(pointer(address), 1, np.int64)[0] = value


@inner
def now() -> Any:
    """``time.monotonic_ns``."""
    at = on_stack(2)
    _clock(1, pointer(at))  # CLOCK_MONOTONIC
    return load_acquire64(at) * 1_000_000_000 + load_acquire64(at + 8)


@inner
def wake(address: int) -> None:
    """Wakes the sleepers on the 32-bit word at an address, which `fetch_add` has just changed. See `Counter`."""
    if load_seq_cst32(address + 4) != 0:
        _syscall(_NUMBER, address, _WAKE, _ALL, 0, 0, 0)


@inner
def sleep(address: int, seen: int, nanoseconds: int) -> None:
    """Sleeps in the kernel until the 32-bit word at an address is woken, for less than a second, unless it differs
    from ``seen``; a signal ends it too.
    """
    limit = on_stack(2)
    store(limit, 0)
    store(limit + 8, nanoseconds)
    fetch_add(address + 4, 1)
    _syscall(_NUMBER, address, _WAIT, seen, limit, 0, 0)
    fetch_add(address + 4, -1)


@inner
def pause(address: int, seen: int, limit: int, oversubscribed: int) -> None:
    """Yields the core once; or sleeps as `sleep` does, not beyond ``limit``, while `OVERSUBSCRIBED_UNTIL` of futex.py,
    which lies at ``oversubscribed``, is still to come.
    """
    begun = now()
    if begun < load_acquire64(oversubscribed):
        if begun < limit:
            sleep(address, seen, limit - begun)
        return
    _yield()
    moment = now()
    if moment - begun > _SLOW_YIELD_NS:
        store(oversubscribed, moment + _BACKOFF_NS)

"""Counters in shared memory that the kernel increments and on which ranks sleep: the one waiting primitive.

Python has no atomic increment and no memory barrier, and unisono ships no compiled code. Linux has both: the futex
operation FUTEX_WAKE_OP is an atomic read-modify-write *by the kernel*, followed by the wake-up of the sleepers if the
old value passes a comparison. So "add one, and wake all if that was the last arrival" is one system call.

Correctness, on x86-64 and on weakly ordered CPUs:

* **Release.** The kernel's increment is a lock-prefixed add on x86-64, a release store (``stlxr``) followed by a full
  barrier (``dmb ish``) on arm64, ``amoadd.aqrl`` on RISC-V. Everything a rank stored before `Counter.add` is visible to
  a rank that sees the incremented value.
* **Acquire.** A rank polls with a plain load. x86-64 never moves a later load before an earlier one, so what follows
  may be read. Elsewhere it may be moved, so `acquire` makes a system call that the kernel documents as a full barrier
  (``smp_mb`` "(B)" in kernel/futex/waitwake.c: FUTEX_WAKE orders what came before it against the read of the bucket's
  waiters) before anything is read.
* **No lost wake-up.** `Counter.sleep` passes the value it saw; the kernel compares and goes to sleep under the lock
  that the waker takes, so an increment in between makes the call return at once.
* **No needless wake-up.** The 32-bit word after a counter counts its sleepers; a sleeper adds itself before it sleeps.
  A compiled loop that has added to the counter reads that word and makes no system call if it is 0. Either the waker
  sees the sleeper there, or the kernel sees the counter changed. A sleeper that is killed stays counted, which costs
  the wakers a system call each time.

A word is 32 bits and wraps; users compare for equality or by difference modulo 2**32.
"""

import ctypes
import functools
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

from unisono.errors import UsageError

__all__ = [
    "BACKOFF_NS", "FUTEX_WAIT", "FUTEX_WAKE", "INT_MAX", "NUMBERS", "OVERSUBSCRIBED_UNTIL", "SLOW_YIELD_NS", "SPIN_NS",
    "Counter", "acquire", "arrive", "fence", "release", "ring", "sleep", "yield_core",
]  # fmt: skip

SPIN_NS = 1_000_000
"""Nanoseconds of polling with sched_yield before a waiter sleeps. A yield takes less than a microsecond where every
rank has a core, but several milliseconds each time that another process wants the core: a hundred yields took 0.8 s on
a busy machine, during which no rank checked whether its peers live."""

FUTEX_WAIT, FUTEX_WAKE, _FUTEX_WAKE_OP = 0, 1, 5
OVERSUBSCRIBED_UNTIL = ctypes.c_int64(0)
"""``time.monotonic_ns`` until which waiters of this process sleep at once, without yielding."""
SLOW_YIELD_NS, BACKOFF_NS = 1_000_000, 200_000_000
"""A yield of more than `SLOW_YIELD_NS` ran a process that computes: a whole slice of the scheduler's, 3 or 4 ms, each
time, while a sleeper is woken as soon as its peer arrives. Waiters then sleep at once for `BACKOFF_NS`: two busy
processes beside two ranks made a call take 4 ms, and a tenth of that with this."""
_OP_ADD, _CMP_EQ = 1, 0
INT_MAX = 2**31 - 1
NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221, "s390x": 238}
_MACHINE = platform.machine()
_STRONG = _MACHINE in ("x86_64", "AMD64")  # stores in order, loads in order; only a load may pass an earlier store

# PyDLL keeps the interpreter lock: a wake-up is shorter than giving the lock away. CDLL gives it away: others may run
# while this thread sleeps.
_quick = ctypes.PyDLL(None).syscall
_blocking = ctypes.CDLL(None, use_errno=True).syscall
_quick.restype = _blocking.restype = ctypes.c_long
_WAIT, _WAKE, _ZERO, _ONE = (ctypes.c_int(value) for value in (FUTEX_WAIT, FUTEX_WAKE, 0, 1))


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@functools.cache
def _number() -> ctypes.c_long:
    if not sys.platform.startswith("linux") or _MACHINE not in NUMBERS:
        raise UsageError(
            f"unisono's shared memory needs Linux on one of {', '.join(NUMBERS)}; this is {sys.platform} on {_MACHINE}"
        )
    return ctypes.c_long(NUMBERS[_MACHINE])


class Counter:
    """One 32-bit word of shared memory: incremented by the kernel, slept on by ranks.

    ``words`` is the segment as a memoryview of format ``I``, ``index`` the word's place in it, ``address`` the
    segment's address in this process; the next word counts the sleepers. Every increment wakes them.
    """

    __slots__ = ("_add_args", "_address", "_words", "index")

    def __init__(self, words: memoryview, index: int, address: int) -> None:
        self._words, self.index, self._address = words, index, address + 4 * index
        self._add_args = _addition(self._address, self._address, 1)

    def value(self) -> int:
        """The word as it is now (a plain load: call `acquire` before reading what it announces)."""
        return int(self._words[self.index])

    def add(self) -> None:
        """Adds one and wakes the sleepers; a release (see the module's text)."""
        _quick(*self._add_args)

    def sleep(self, seen: int, seconds: float) -> None:
        """Sleeps in the kernel until woken, at most ``seconds``, unless the word differs from ``seen`` already."""
        sleep(self._address, seen, seconds)


@functools.lru_cache(maxsize=1024)
def _addition(address: int, woken: int, full: int, value: int = 1) -> tuple[Any, ...]:
    """The arguments of FUTEX_WAKE_OP: it adds ``value`` at an address and wakes the sleepers of ``woken``.

    Those at the address are woken if that makes it ``full``.
    """
    if full > 2048:
        raise UsageError(f"a meeting of {full} ranks on one host is beyond the 2048 that a futex comparison holds")
    return (
        _number(),
        ctypes.c_void_p(woken),
        ctypes.c_int(_FUTEX_WAKE_OP),
        ctypes.c_int(INT_MAX),
        ctypes.c_void_p(INT_MAX),
        ctypes.c_void_p(address),
        ctypes.c_uint32((_OP_ADD << 28) | (_CMP_EQ << 24) | ((value & 0xFFF) << 12) | full - value),
    )


def arrive(address: int, full: int, count: int = 1) -> None:
    """Adds ``count`` to the 32-bit word at an address and wakes its sleepers if that makes it ``full``; a release."""
    _quick(*_addition(address, address + 4, full, count))  # the word behind it has no sleepers


def ring(address: int, count: int = 1) -> None:
    """Adds ``count`` to the 32-bit word at an address and wakes its sleepers; a release."""
    _quick(*_addition(address, address, count, count))


def sleep(address: int, seen: int, seconds: float) -> None:
    """Sleeps until the 32-bit word at an address is woken, at most ``seconds``, unless it differs from ``seen``."""
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    word = ctypes.c_void_p(address)
    _quick(*_addition(address + 4, address + 4, 1))
    try:
        _blocking(_number(), word, _WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, _ZERO)
    finally:
        _quick(*_addition(address + 4, address + 4, 1, -1))


def yield_core() -> bool:
    """Yields the core once; returns False, nothing done, if it is better to sleep."""
    begun = time.monotonic_ns()
    if begun < OVERSUBSCRIBED_UNTIL.value:
        return False
    os.sched_yield()
    now = time.monotonic_ns()
    if now - begun > SLOW_YIELD_NS:
        OVERSUBSCRIBED_UNTIL.value = now + BACKOFF_NS
    return True


_dummy = ctypes.byref(ctypes.c_uint32(0))


def fence() -> None:
    """A full barrier."""
    _quick(_number(), _dummy, _WAKE, _ONE, None, None, _ZERO)


def _nothing() -> None:
    """The CPU keeps the order by itself."""


acquire: Callable[[], None] = _nothing if _STRONG else fence
"""Call after a load that announces something, before reading it."""
release: Callable[[], None] = _nothing if _STRONG else fence
"""Call after writing something, before a plain store that announces it."""

"""Processes of this host: identity, state, cores."""

import hashlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from functools import cache

__all__ = [
    "Identity",
    "OwnThread",
    "affinity_mark",
    "alive",
    "cores",
    "fate",
    "pin",
    "run_delay",
    "start_time",
    "stopped",
    "ticks",
    "uncollected",
]


@dataclass(frozen=True)
class Identity:
    """One process: its pid and its start time in clock ticks; ``host``: a mark of its host, 0 for this one."""

    pid: int
    started: int
    host: int = 0

    @classmethod
    def mine(cls) -> "Identity":
        """This process."""
        return cls(os.getpid(), _started(os.getpid()))


@cache
def cores() -> int:
    """The number of cores the ranks of this host have, as it was when this was first asked.

    They are those of this process or, if it has been given a share of them, of its parent.
    """
    return max(len(os.sched_getaffinity(pid)) for pid in (0, os.getppid()))


def affinity_mark() -> int:
    """A digest of the set of cores that this process may use: 63 bits, not 0."""
    text = repr(sorted(os.sched_getaffinity(0))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1 or 1


def _stat(pid: int) -> list[bytes]:
    """The kernel's fields on a process, from its state on."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def start_time(pid: int) -> int:
    """The kernel's start time of a process in clock ticks since boot, 0 if it is gone or a zombie.

    A pid may be used again; pid and start time together name one process for ever. Raises `OSError` if this process may
    not look, having too many files open, say.
    """
    try:
        fields = _stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in (b"Z", b"X", b"x") else int(fields[19])


_started = cache(start_time)  # of this process: known even when no file can be opened any more
os.register_at_fork(after_in_child=_started.cache_clear)


def ticks() -> int:
    """Now, in the clock of `start_time`."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def fate(identity: Identity) -> str:
    """The end of a process that is gone, as far as the kernel knows: a zombie keeps its status."""
    try:
        fields = _stat(identity.pid)
    except OSError:
        return "it ended without a word (killed, or by os._exit)"
    if int(fields[19]) != identity.started:
        return "it ended without a word (killed, or by os._exit)"
    status = int(fields[49])
    if status & 0x7F:
        number = status & 0x7F
        names = {int(s): s.name for s in signal.Signals}
        return f"killed by {names.get(number, f'signal {number}')}"
    return f"it ended with exit code {status >> 8 & 0xFF}"


def stopped(identity: Identity) -> bool:
    """True if the process is stopped, by a signal or in a debugger."""
    try:
        return _stat(identity.pid)[0] in (b"T", b"t")
    except TimeoutError:  # a signal handler's
        raise
    except OSError:
        return False


def uncollected(identity: Identity) -> bool:
    """True if the process has ended and its parent, another than this one, has yet to ask how: it is a zombie."""
    try:
        fields = _stat(identity.pid)
    except OSError:
        return False
    return fields[0] == b"Z" and int(fields[19]) == identity.started and int(fields[1]) != os.getpid()


def alive(identity: Identity) -> bool:
    """True if that very process still runs (a stopped one does; a zombie does not), as far as is known."""
    try:
        return identity.started != 0 and start_time(identity.pid) == identity.started
    except TimeoutError:  # a signal handler's
        raise
    except OSError:
        return True


def run_delay(identity: Identity) -> float:
    """Seconds that the main thread of a process has been ready to run and waited for a core; 0.0 if that is not known.

    The kernel's name for it, in its documentation of ``schedstat``.
    """
    try:
        with open(f"/proc/{identity.pid}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except TimeoutError:  # a signal handler's
        raise
    except (OSError, IndexError):
        return 0.0


def pin(rank: int, world_size: int) -> list[int]:
    """Keeps this process to its share of the cores, and returns them: equal shares, in the order of the ranks.

    Does nothing, and returns none, where ranks outnumber cores or an affinity is set already.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // world_size
    if not share or len(cores) != os.cpu_count():
        return []
    mine = cores[rank * share : (rank + 1) * share]
    os.sched_setaffinity(0, mine)
    return mine


_GONE = 0.1  # s: how long the system may take to end a thread that has ended its Python


class OwnThread(threading.Thread):
    """A thread of the library itself, which issues no calls of its own accord."""

    def join(self, timeout: float | None = None) -> None:
        """As `Thread.join`; after that the thread is gone from the system, too, which takes some microseconds more."""
        super().join(timeout)
        limit = time.monotonic() + _GONE
        while not self.is_alive() and os.path.exists(f"/proc/self/task/{self.native_id}") and time.monotonic() < limit:
            os.sched_yield()

"""Who the ranks are, as processes of this host, and whether they still live."""

import os
from dataclasses import dataclass

__all__ = ["Identity", "alive", "boot_id", "start_time"]


def start_time(pid: int) -> int:
    """The kernel's start time of a process in clock ticks since boot, 0 if it is gone or a zombie.

    A pid may be used again; pid and start time together name one process for ever.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X", b"x") else int(fields[19])


def boot_id() -> str:
    """Names this host until its next boot: equal for two processes exactly if they share the kernel."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


@dataclass(frozen=True)
class Identity:
    """One process of this host: its pid and its start time in clock ticks."""

    pid: int
    started: int

    @classmethod
    def mine(cls) -> "Identity":
        """This process."""
        return cls(os.getpid(), start_time(os.getpid()))


def alive(identity: Identity) -> bool:
    """Whether that very process still runs (a stopped one does; a zombie does not)."""
    return identity.started != 0 and start_time(identity.pid) == identity.started

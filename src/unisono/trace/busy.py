"""The CPU time of a thread, readable from any thread of its process: the rest of the time it was idle.

Time on a core, and time spent ready to run while none was free: ranks may outnumber cores. Never imports torch.
"""

import os
import threading
import time
from collections.abc import Callable

__all__ = ["busy_clock"]


def busy_clock(thread: threading.Thread) -> Callable[[], int]:
    """A clock of ``thread``, which is alive: nanoseconds on a core and waiting for one.

    Where the kernel does not tell how long threads wait for a core (/proc/.../schedstat), on a core alone.
    """
    assert thread.ident is not None
    cpu, read = time.pthread_getcpuclockid(thread.ident), time.clock_gettime_ns
    try:
        fd = os.open(f"/proc/self/task/{thread.native_id}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        int(os.pread(fd, 64, 0).split()[1])
    except (OSError, IndexError, ValueError):
        return lambda: read(cpu)
    return lambda: read(cpu) + int(os.pread(fd, 64, 0).split()[1])

"""Calls on GPUs that all ranks have issued and that do not end: opposite orders of two groups, a stuck NCCL."""

import threading
from time import monotonic

from unisono.backend.inner import Inner
from unisono.errors import CollectiveTimeout, DeadlockError
from unisono.watch.device_guard import DeviceGuard
from unisono.watch.device_order import Issued, crossed

__all__ = ["Stalls"]

_last: dict[DeviceGuard, list[Issued]] = {}  # of each group of this process
_lock = threading.Lock()


class Stalls:
    """Of one rank in one group; `check` is for its watcher."""

    def __init__(self, guard: DeviceGuard, inner: Inner) -> None:
        self._guard, self._inner = guard, inner
        self._published: tuple[int, ...] = ()
        self._since = monotonic()  # the last call of any rank that was seen

    def check(self, timeout: float) -> None:
        """Raises `DeadlockError` if ranks wait for each other's calls of two groups, `CollectiveTimeout` if NCCL does
        not end a call within ``timeout``, seconds, though every rank has issued it.
        """
        published = self._guard.published()
        if published != self._published:
            self._published, self._since = published, monotonic()
            with _lock:
                _last[self._guard] = self._guard.orders()
        self._check_orders()
        if monotonic() - self._since > timeout and len(set(published)) == 1:
            self._since = monotonic()
            if (call := self._guard.last_call) is not None and self._inner.unfinished():
                raise CollectiveTimeout(
                    f"calls of NCCL in the group up to {call.describe()}, its no. {published[0]} on GPUs, did not end "
                    f"within {timeout:g} s, though all ranks have issued them: what they wait for is on the GPU, such "
                    "as a call of another group that another rank has issued after it"
                )

    def _check_orders(self) -> None:
        with _lock:
            pair = crossed(call for calls in _last.values() for call in calls)
        if pair is None or self._guard not in (pair[0].group, pair[1].group):
            return
        raise DeadlockError(
            f"ranks wait for each other on GPUs, and none can go on:\n  this rank has issued {pair[0].words},\n"
            f"    before {pair[1].words};\n  rank {pair[0].peer} has issued them the other way round.\n"
            "On a stream a call begins when those before it have ended: calls of different groups need the same order "
            "on all ranks, or streams of their own"
        )

    def close(self) -> None:
        """Forgets the group's calls."""
        with _lock:
            _last.pop(self._guard, None)

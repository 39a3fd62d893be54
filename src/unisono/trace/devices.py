"""Inside a rank of a traced program: notes its calls on GPUs, and whether kernels or NCCL carry each of them.

The times are the host's, from torch's function to its return: calls on GPUs end behind the host. How long they run on
the GPU torch.profiler knows (`unisono trace --compute`). Messages are seen as the time that threads are inside them.
"""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from unisono.trace import KEPT

__all__ = ["DeviceNotes"]

_Method = Callable[..., Any]


class DeviceNotes:
    """The last calls on GPUs of this process: ``noted`` has (group, the call's number in it, call, way, begin, end)."""

    def __init__(self) -> None:
        self.noted: deque[tuple[Any, int, Any, str, int, int]] = deque(maxlen=KEPT)
        self._last: dict[str, int] = {}  # the number of the last call noted, by the nonce of its group
        self._by_nccl = threading.local()

    def start(self, timed: Callable[[_Method, str], _Method]) -> None:
        """Wraps the calls of groups that have GPUs as well; ``timed`` notes when a thread is inside a method."""
        from unisono.backend.caller_frame import keep_from_dynamo
        from unisono.backend.device_calls import DeviceCalls, LaunchedWork
        from unisono.backend.device_group import METHODS, TwoDeviceGroup
        from unisono.backend.inner import Inner

        for name in METHODS:
            setattr(TwoDeviceGroup, name, timed(vars(TwoDeviceGroup)[name], name))
        for name in ("again", "by_nccl", "call", "launch"):
            setattr(DeviceCalls, name, self.noting(vars(DeviceCalls)[name]))
        for owner, name, wrapped in (
            (LaunchedWork, "wait", timed(LaunchedWork.wait, "wait")),
            (DeviceCalls, "batch", timed(DeviceCalls.batch, "batch_isend_irecv")),
            (Inner, "call", self.carrying(Inner.call)),
        ):
            setattr(owner, name, wrapped)
        keep_from_dynamo(TwoDeviceGroup)

    def carrying(self, method: _Method) -> _Method:
        """A method by which an inner group carries a call."""

        @functools.wraps(method)
        def carried(*args: Any, **kwargs: Any) -> Any:
            self._by_nccl.seen = True
            return method(*args, **kwargs)

        return carried

    def noting(self, method: _Method) -> _Method:
        """A method of a group's calls on GPUs; what it has issued, if anything, is noted when it returns."""

        @functools.wraps(method)
        def noted(calls: Any, *args: Any, **kwargs: Any) -> Any:
            group = calls.group
            before = group.device_guard.number if hasattr(group, "device_guard") else 0
            began, self._by_nccl.seen = time.monotonic_ns(), False
            work = method(calls, *args, **kwargs)
            guard = getattr(group, "device_guard", None)
            if guard is not None and guard.number not in (before, self._last.get(group.nonce, 0)):
                self._last[group.nonce] = guard.number
                way = "NCCL" if self._by_nccl.seen else "kernel"
                self.noted.append((group, guard.number, guard.last_call, way, began, time.monotonic_ns()))
            return work

        return noted

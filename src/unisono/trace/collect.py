"""Inside a rank of a traced program: notes when it communicates, and writes that down at the end.

``UNISONO_TRACE=DIR`` turns it on (`unisono trace` sets it); without that nothing of this is loaded and no call does
more than it always does. The calls themselves are taken from the flight record, which is kept anyway and made long
enough; added are the times that threads spend inside calls and waits, those spent in reductions, and, while calls are
under way, how busy the main thread is: it may wait for them where no method of ours sees it, as in DDP's backward.
``UNISONO_TRACE_COMPUTE=1`` runs torch.profiler from the first group to the end.
"""

import atexit
import functools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import Any

from unisono.trace.arm import KEPT
from unisono.trace.busy import busy_clock
from unisono.watch import flight
from unisono.watch.call import call_site, name_of_dtype, piece_numel, site_text
from unisono.watch.schema import Entry

__all__ = ["Collector"]

_CALLS = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "broadcast", "allgather", "all_gather_single", "all_gather_single_coalesced",
    "allgather_coalesced", "gather", "scatter", "alltoall", "all_to_all_single", "barrier", "send", "recv",
    "recv_anysource",
)  # fmt: skip
_Method = Callable[..., Any]


class Collector:
    """What one process notes. Times are ``time.monotonic_ns``, which all processes of a host share."""

    def __init__(self, folder: Path, compute: bool = False) -> None:
        self.folder, self.compute = folder, compute
        self.spans: list[tuple[str, int, int, int, str]] = []
        self.reductions: list[tuple[int, int]] = []
        self.marks: deque[tuple[int, int]] = deque(maxlen=2 * KEPT)  # moments, and how long the main thread was busy
        self._open: set[object] = set()  # calls under way while the main thread may do something else
        self._main = threading.main_thread().ident
        self._busy = busy_clock(threading.main_thread())
        self.entries: dict[tuple[str, int], tuple[int, Entry]] = {}
        self.rank, self._since = -1, 0
        self._profiler: Any = None
        self._undo: list[tuple[Any, str, Any]] = []

    def start(self) -> None:
        """Wrap the calls, the waits and the reductions; arrange for the end. What was issued before is left out."""
        from unisono.backend.dynamo import keep_from_dynamo
        from unisono.backend.group import Group
        from unisono.backend.process_group import UnisonoProcessGroup
        from unisono.backend.work import PendingWork
        from unisono.run.lane import Lane

        self._since = time.monotonic_ns()
        for name in _CALLS:
            original = vars(UnisonoProcessGroup)[name]
            wrapped = self._timed(original, name)
            for alias in [key for key, value in vars(UnisonoProcessGroup).items() if value is original]:
                self._replace(UnisonoProcessGroup, alias, wrapped)
        self._replace(Group, "close", self._keeping(Group.close))
        self._replace(PendingWork, "wait", self._timed(PendingWork.wait, "wait"))
        self._replace(Lane, "_end", self._ending(Lane._end))
        self._wrap_reducers()
        keep_from_dynamo(UnisonoProcessGroup)
        if self.compute:
            self._start_profiler()
        atexit.register(self.write)
        util.Finalize(None, self.write, exitpriority=100)  # processes of multiprocessing end without atexit

    def stop(self) -> None:
        """Take every wrapper off again."""
        for owner, name, original in reversed(self._undo):
            setattr(owner, name, original)
        self._undo.clear()
        atexit.unregister(self.write)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def _timed(self, method: _Method, name: str) -> _Method:
        spans, under_way, mark = self.spans, self._open, self._mark
        now, thread, main = time.monotonic_ns, threading.get_ident, self._main

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            me, here = thread(), object()
            if me != main:
                under_way.add(here)
            if under_way:
                mark()
            began = now()
            try:
                work = method(*args, **kwargs)
                self._follow(work)
                return work
            finally:
                if len(spans) < KEPT:
                    spans.append((name, began, now(), me, site_text(call_site())))
                if under_way:
                    mark()
                under_way.discard(here)

        return timed

    def _mark(self) -> None:
        """From one mark to the next the main thread has computed for as long as it was busy."""
        self.marks.append((time.monotonic_ns(), self._busy()))

    def _follow(self, work: Any) -> None:
        """A call that goes on after it was issued."""
        task = getattr(work, "_task", None)
        if task is not None:
            self._open.add(task)
            if task.done:
                self._open.discard(task)

    def _ending(self, end: _Method) -> _Method:
        """The end of a call under way, by whichever thread carries it then."""
        under_way, mark = self._open, self._mark

        @functools.wraps(end)
        def ended(lane: Any, task: Any, error: BaseException | None = None) -> None:
            end(lane, task, error)
            if task in under_way:
                mark()
                under_way.discard(task)

        return ended

    def _keeping(self, close: _Method) -> _Method:
        """What a group leaves behind is taken down before it is closed; the default group's end is the end."""

        @functools.wraps(close)
        def leave(group: Any, *args: Any, **kwargs: Any) -> Any:
            self.keep()
            try:
                return close(group, *args, **kwargs)
            finally:
                if group.label == "the default group":
                    self.write()

        return leave

    def _wrap_reducers(self) -> None:
        """Times torch's reductions; what compiled loops do is one piece, and counts as moving."""
        from unisono.run.reduce import Reducer

        reductions, now, original = self.reductions, time.monotonic_ns, Reducer.__call__

        @functools.wraps(original)
        def timed(reducer: Any, parts: Any, out: Any) -> None:
            began = now()
            original(reducer, parts, out)
            if len(reductions) < KEPT:
                reductions.append((began, now()))

        self._replace(Reducer, "__call__", timed)

    def _start_profiler(self) -> None:
        import torch.profiler

        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        try:
            self._profiler.start()
        except RuntimeError as error:  # the program profiles itself
            self._profiler = None
            logging.getLogger("unisono").warning("no compute events in the trace: %s", error)

    def keep(self) -> None:
        """Take down the flight records of all groups that are alive."""
        for rank, entry in flight.everything():
            if entry.when < self._since:
                continue
            self.entries[entry.label, entry.number] = (rank, entry)
            if self.rank < 0 or entry.label == "the default group":
                self.rank = entry.names[rank]

    def write(self) -> None:
        """Write everything noted so far; a process that has communicated nothing writes nothing."""
        self.keep()
        if not self.entries:
            return
        name = f"rank-{self.rank}-{os.getpid()}"
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self.folder / f"{name}.compute.json"))
            self._profiler = None
        data = {
            "rank": self.rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "program": " ".join(sys.argv),
            "clock": time.time_ns() - time.monotonic_ns(),
            "main": threading.main_thread().ident,
            "full": len(self.spans) >= KEPT or any(entry.number > KEPT for _, entry in self.entries.values()),
            "calls": [_plain(rank, entry) for rank, entry in self.entries.values()],
            "spans": self.spans,
            "reductions": self.reductions,
            "marks": sorted(self.marks),
        }
        draft = self.folder / f".{name}.tmp"
        try:
            draft.write_text(json.dumps(data), encoding="utf-8")
            draft.replace(self.folder / f"{name}.json")
        except OSError as error:
            logging.getLogger("unisono").warning("cannot write the trace into %s: %s", self.folder, error)


def _size(entry: Entry) -> int:
    """Bytes as nccl-tests count them: all ranks' blocks together where ranks hold blocks."""
    call = entry.call
    if call.sends:
        elements = max(sum(map(piece_numel, side)) for side in (call.sends, call.expects))
        return elements * (call.dtype.itemsize if call.dtype is not None else 0)
    return call.nbytes * (len(entry.names) if call.op == "all_gather" else 1)


def _plain(rank: int, entry: Entry) -> dict[str, Any]:
    call = entry.call
    return {
        "group": entry.label,
        "ranks": list(entry.names),
        "number": entry.number,
        "op": call.op,
        "nbytes": _size(entry),
        "words": call.describe(entry.names),
        "dtype": name_of_dtype(call.dtype),
        "issued": entry.when,
        "ended": entry.ended,
        "message": entry.way is not None,
    }

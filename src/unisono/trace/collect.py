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
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from signal import SIGTERM
from types import FrameType
from typing import Any

import unisono
from unisono.errors import CollectiveTimeout, DeadlockError, PeerLostError
from unisono.runtime.call import Call, Site, piece_numel, site_text
from unisono.runtime.call_site import is_inner, is_standard
from unisono.trace import KEPT
from unisono.trace.devices import DeviceNotes
from unisono.watch import clocks, flight
from unisono.watch.flight import QueueRecord
from unisono.watch.fr_schema import Entry

__all__ = ["Collector", "busy_clock", "place"]

_CALLS = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "broadcast", "allgather", "all_gather_single", "all_gather_single_coalesced",
    "allgather_coalesced", "gather", "scatter", "alltoall", "all_to_all_single", "barrier", "send", "recv",
    "recv_anysource",
)  # fmt: skip
_FATAL = (PeerLostError, DeadlockError, CollectiveTimeout)
_Method = Callable[..., Any]
_ROOT = os.path.dirname(os.path.abspath(unisono.__file__)) + os.sep
_PROGRAMS = (f"{_ROOT}train{os.sep}", f"{_ROOT}bench{os.sep}")


class Collector:
    """The record of one process. Times are ``time.monotonic_ns``, which all processes of a host share."""

    def __init__(self, folder: Path, compute: bool = False) -> None:
        self.folder, self.compute = folder, compute
        self.spans: deque[tuple[str, int, int, int, str]] = deque(maxlen=KEPT)
        self.reductions: deque[tuple[int, int]] = deque(maxlen=KEPT)
        self.marks: deque[tuple[int, int]] = deque(maxlen=2 * KEPT)  # moments, and how long the main thread was busy
        self.devices = DeviceNotes()
        self._open: set[object] = set()  # calls under way while the main thread may do something else
        self._faulted = False
        self._writing = threading.RLock()  # a worker may see a fault while the main thread ends
        self._main = threading.main_thread().ident
        self._busy = busy_clock(threading.main_thread())
        self.entries: dict[tuple[str, str, int], tuple[QueueRecord, Entry]] = {}
        self.groups: dict[str, tuple[str, list[int]]] = {}  # label and ranks by the nonce of their memory
        self._elder: set[str] = set()  # groups from before the start
        self._namesakes: Counter[str] = Counter()
        self.rank, self._since = -1, 0
        self._whole = 0  # from when on calls of all groups are kept, if some are not
        self._profiler: Any = None
        self._profiled_by = 0  # the thread that has started the profiler, and alone can stop it

    def start(self) -> None:
        """Wrap the calls, the waits and the reductions; arrange for the end. What was issued before is left out."""
        from unisono.backend.caller_frame import keep_from_dynamo
        from unisono.backend.group import Group
        from unisono.backend.process_group import UnisonoProcessGroup
        from unisono.backend.work import PendingWork
        from unisono.runtime.queue import CallQueue
        from unisono.runtime.reduce import Reducer

        self._since = time.monotonic_ns()
        self._elder = {record.memory for record, *_ in flight.everything()}
        for name in _CALLS:
            original = vars(UnisonoProcessGroup)[name]
            wrapped = self._timed(original, name)
            for alias in [key for key, value in vars(UnisonoProcessGroup).items() if value is original]:
                setattr(UnisonoProcessGroup, alias, wrapped)
        for owner, name, wrapped in (
            (Group, "close", self._keeping(Group.close)),
            (PendingWork, "wait", self._timed(PendingWork.wait, "wait")),
            (CallQueue, "_end", self._ending(CallQueue._end)),
            (Reducer, "__call__", self._reducing(Reducer.__call__)),
        ):
            setattr(owner, name, wrapped)
        keep_from_dynamo(UnisonoProcessGroup)
        self.devices.start(self._timed)
        if self.compute:
            self._start_profiler()
        atexit.register(self.write)
        util.Finalize(None, self.write, exitpriority=100)  # processes of multiprocessing end without atexit
        if threading.current_thread() is threading.main_thread() and signal.getsignal(SIGTERM) is signal.SIG_DFL:
            signal.signal(SIGTERM, self._terminated)  # torchrun sends it right behind a Ctrl-C

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """Write, then end as without a handler."""
        try:
            self.write()
        finally:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

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
            except _FATAL:
                if _ended(args[0]):
                    self._save_after_fault()
                raise
            finally:
                spans.append((name, began, now(), me, site_text(place())))
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

    def _save_after_fault(self) -> None:
        """The first time, at once: whoever started the ranks may kill them before they end by themselves."""
        if not self._faulted:
            self._faulted = True
            self.write()

    def _ending(self, end: _Method) -> _Method:
        """The end of a call under way, by whichever thread carries it then."""
        under_way, mark = self._open, self._mark

        @functools.wraps(end)
        def ended(queue: Any, task: Any, error: BaseException | None = None) -> None:
            end(queue, task, error)
            if task in under_way:
                mark()
                under_way.discard(task)
                if isinstance(error, _FATAL):
                    self._save_after_fault()

        return ended

    def _keeping(self, close: _Method) -> _Method:
        """Saves the records of a group before it closes; collection ends with the default group."""

        @functools.wraps(close)
        def leave(group: Any, *args: Any, **kwargs: Any) -> Any:
            self.keep()
            try:
                return close(group, *args, **kwargs)
            finally:
                if group.label == "the default group":
                    self.write()

        return leave

    def _reducing(self, original: _Method) -> _Method:
        """Times torch's reductions; what compiled loops do is one piece, and counts as moving."""
        reductions, now = self.reductions, time.monotonic_ns

        @functools.wraps(original)
        def timed(reducer: Any, parts: Any, out: Any, complete: int = 0) -> None:
            began = now()
            original(reducer, parts, out, complete)
            reductions.append((began, now()))

        return timed

    def _start_profiler(self) -> None:
        import torch.profiler

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiled_by = threading.get_ident()
        try:
            self._profiler.start()
        except RuntimeError as error:  # the program profiles itself
            self._profiler = None
            logging.getLogger("unisono").warning("no compute events in the trace: %s", error)

    def keep(self) -> None:
        """Take down the flight records of all groups that are alive."""
        with self._writing:
            for record, entries, overflows in flight.everything():
                fresh = [entry for entry in entries if entry.when >= self._since]
                if fresh or record.memory not in self._elder:
                    self._meet(record)
                if fresh and overflows:
                    self._whole = max(self._whole, fresh[0].when)
                for entry in fresh:
                    self.entries[record.memory, entry.label, entry.number] = (record, entry)

    def _meet(self, record: QueueRecord) -> None:
        """Groups of one label, as default groups one after another are, get a number behind it."""
        if record.memory not in self.groups:
            self._namesakes[record.label] += 1
            number = self._namesakes[record.label]
            self.groups[record.memory] = record.label + (f" ({number})" if number > 1 else ""), record.global_ranks
        if self.rank < 0 or record.label == "the default group":
            self.rank = record.global_ranks[record.rank]

    def _covered(self) -> int:
        """The moment from which nothing is missing; 0 if nothing is."""
        full = [kept[0] for kept in (self.reductions, self.marks) if len(kept) == kept.maxlen]
        spans = [self.spans[0][2]] if len(self.spans) == KEPT else []
        return max([self._whole, *spans, *(moment for moment, _ in full)])

    def write(self) -> None:
        """Write everything noted so far; a process that has communicated nothing writes nothing.

        The first time in the thread that has started the profiler stops that, and writes its events too.
        """
        if sys.is_finalizing():  # a group that something has kept: it has been written, at exit at the latest
            return
        with self._writing:
            self.keep()
            if self.entries or self.devices.noted:
                self._write(f"rank-{self.rank}-{os.getpid()}")

    def _write(self, name: str) -> None:
        draft = self.folder / f".{name}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._profiler is not None and threading.get_ident() == self._profiled_by:
                self._profiler.stop()
                self._profiler.export_chrome_trace(str(self.folder / f"{name}.compute.json"))
                self._profiler = None
            draft.write_text(json.dumps(self._noted()), encoding="utf-8")
            draft.replace(self.folder / f"{name}.json")
        except OSError as error:
            logging.getLogger("unisono").warning("cannot write the trace into %s: %s", self.folder, error)

    def _noted(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "program": " ".join(sys.argv),
            "clock": time.time_ns() - time.monotonic_ns(),
            "offset": clocks.offset(),
            "main": threading.main_thread().ident,
            "since": self._covered(),
            "groups": {memory: ranks for memory, (_, ranks) in self.groups.items()},
            "calls": [self._plain(record, entry) for record, entry in self.entries.values()],
            "device_calls": [self._on_device(*noted) for noted in self.devices.noted],
            "spans": list(self.spans),
            "reductions": list(self.reductions),
            "marks": sorted(self.marks),
        }

    def _on_device(self, group: Any, number: int, call: Call, way: str, began: int, ended: int) -> dict[str, Any]:
        words, nbytes = call.describe(group.global_ranks), _size(call, len(group.global_ranks))
        return {"group": group.label, "number": number, "op": call.op, "nbytes": nbytes, "words": words, "way": way,
                "begin": began, "end": ended}  # fmt: skip

    def _plain(self, record: QueueRecord, entry: Entry) -> dict[str, Any]:
        call, group = entry.call, self.groups[record.memory][0]
        return {
            "memory": record.memory,
            "group": group + entry.label.removeprefix(record.label),
            "ranks": list(entry.global_ranks),
            "number": entry.number,
            "op": call.op,
            "nbytes": _size(call, len(entry.global_ranks)),
            "words": call.describe(entry.global_ranks),
            "begin": entry.when,
            "end": entry.ended,
            "message": entry.label if entry.way is not None else "",
        }


def _ended(raiser: Any) -> bool:
    """True if an error ends the call: one that a wait raises need not, if the wait has a timeout of its own."""
    task = getattr(raiser, "_task", None)
    return task is None or task.done


def _size(call: Call, ranks: int) -> int:
    """Bytes as nccl-tests count them: all ranks' blocks together where ranks hold blocks."""
    if call.sends:
        elements = max(sum(map(piece_numel, side)) for side in (call.sends, call.expects))
        return elements * (call.dtype.itemsize if call.dtype is not None else 0)
    return call.nbytes * (ranks if call.op == "all_gather" else 1)


def busy_clock(thread: threading.Thread) -> Callable[[], int]:
    """A clock of ``thread``, which is alive: nanoseconds on a core and waiting for one, for ranks may outnumber cores.

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


def place() -> Site:
    """The nearest frame of a program, else the nearest that is neither torch's nor unisono's.

    `unisono train` and `unisono bench` are programs; what starts their processes, as multiprocessing does anybody's, is
    none.
    """
    frame: FrameType | None = sys._getframe(1)
    outer: Site = ("", 0, "")
    while frame is not None:
        file = frame.f_code.co_filename
        inner = is_inner(file)
        if file.startswith(_PROGRAMS) or not (inner or is_standard(file)):
            return file, frame.f_lineno, frame.f_code.co_name
        if not (inner or outer[0]):
            outer = file, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return outer

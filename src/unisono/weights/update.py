"""What an update comes to: its report, and the handle of one that runs in the background."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from unisono.errors import CollectiveTimeout
from unisono.transport.process import OwnThread
from unisono.units import show_count, show_seconds
from unisono.weights.arguments import seconds_of

__all__ = ["Report", "Update"]


@dataclass(frozen=True)
class Report:
    """What one update did.

    version: the version shown. receivers, lost: names of the replicas that took part, and of those left out. tensors:
    how many were taken, at this rank or, on a sender, by each replica. skipped: unchanged ones, not sent (delta).
    nbytes: of the tensors taken, at this rank or, on a sender, at all replicas. moved: bytes from process to process.
    snapshot: bytes copied before a background push. seconds: from the announcement on. bound: the least time, in
    seconds, in which the plan can move on this machine as modelled; 0 if nothing moved. checksum: whether tensors were
    checked.
    """

    version: int
    receivers: tuple[str, ...]
    lost: tuple[str, ...] = ()
    tensors: int = 0
    skipped: int = 0
    nbytes: int = 0
    moved: int = 0
    snapshot: int = 0
    seconds: float = 0.0
    bound: float = 0.0
    checksum: bool = True

    def __str__(self) -> str:
        count = show_count(len(self.receivers), "receiver")
        text = f"version {self.version}: {show_count(self.tensors, 'tensor')}, {_show(self.nbytes)} to {count}"
        text += f" in {show_seconds(self.seconds)}"
        if self.bound and self.seconds:
            text += f", {100 * self.bound / self.seconds:.0f} % of the bound"
        if self.skipped:
            text += f", {self.skipped} unchanged"
        if self.lost:
            text += f", lost {', '.join(self.lost)}"
        return text if self.checksum else f"{text}, not checked"


def _show(nbytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} B"


class Update:
    """An update in the background."""

    def __init__(self, run: Callable[[], Report], what: str) -> None:
        """Starts ``run`` in a thread."""
        self._what = what
        self._report: Report | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = OwnThread(target=self._run, args=(run,), name=f"unisono {what}", daemon=True)
        self._thread.start()

    def _run(self, run: Callable[[], Report]) -> None:
        try:
            self._report = run()
        except BaseException as error:
            self._error = error
        self._ended.set()

    @property
    def done(self) -> bool:
        """True once it has ended, in whatever way."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Report:
        """Its report. Raises what ended it, or `CollectiveTimeout` after ``timeout`` seconds; it then goes on."""
        began = time.monotonic()
        if not self._ended.wait(None if timeout is None else seconds_of(timeout)):
            raise CollectiveTimeout(f"the {self._what} has not ended after {time.monotonic() - began:.3g} s")
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

"""The queue of collectives: in order of issue, one meeting at a time, every call checked by the guard."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from unisono.errors import CollectiveTimeout, MismatchError, PeerLostError, UnisonoError
from unisono.runtime.call import Call, Site
from unisono.runtime.call_site import call_site
from unisono.runtime.control import Control
from unisono.runtime.crossing import Crossing
from unisono.runtime.monitor import Loss, Monitor
from unisono.runtime.network import Network
from unisono.runtime.prepared import AddressTable, Prepared, Preparer
from unisono.runtime.queue import CallQueue
from unisono.runtime.task import (
    ConsensusError,
    Task,
    in_listener,
    internal_error,
    interruption,
    keep_shared,
    patience_for,
)
from unisono.runtime.words import ABORTED as LOST
from unisono.runtime.words import DIFFERS, DONE, UNREADY, WAITS
from unisono.runtime.worker import INLINE, AsyncProgress
from unisono.transport.board import Board
from unisono.transport.futex import SPIN_NS
from unisono.transport.inference import outside_inference
from unisono.transport.layout import ABORTED, COMPLETED
from unisono.transport.peer_mappings import PeerMappings
from unisono.transport.process import Identity
from unisono.units import name_ranks

__all__ = ["CollectiveQueue", "CollectiveTask", "Part"]

_Memory = torch.Tensor | AddressTable
Part = tuple[Prepared, _Memory, _Memory]
"""A program of a call, its output and its input."""


class CollectiveTask(Task):
    """A collective under way: its programs, in order, and functions that copy results to their tensors."""

    __slots__ = ("begun", "deliver", "parts")

    def __init__(
        self,
        call: Call,
        parts: Sequence[Part],
        outputs: list[Any],
        timeout: float,
        deliver: Sequence[Callable[[], object]] = (),
    ) -> None:
        super().__init__(call, outputs, timeout)
        self.parts, self.deliver, self.begun = list(parts), deliver, False


class CollectiveQueue(CallQueue):
    """Runs prepared calls (runtime/prepared.py) over a board, in the order in which they were issued."""

    def __init__(self, board: Board, global_ranks: Sequence[int], label: str, monitor: Monitor) -> None:
        super().__init__(board.segment, board.rank, global_ranks, label, monitor)
        self._board = board
        self._queue: deque[CollectiveTask] = deque()
        self._incoming: deque[CollectiveTask] = deque()  # issued, not yet accepted by the thread that holds the queue
        self._issuing = threading.RLock()
        self._longs, self._issued = board.segment.longs, 0
        self._comparing = False  # at a meeting where ranks report that their calls differ: it stands whoever gives up
        self._aborted_at, self._completed_at = (board.segment.field(board.rank, f) for f in (ABORTED, COMPLETED))
        self._calls, self._next_number = monitor.call_log.calls, itertools.count(1).__next__
        self.mappings = PeerMappings(board.segment, board.rank, board.size)
        self._control = Control(board, monitor.call_log, self.mappings.bases)
        self._at = self._control.address
        network = board.segment.elsewhere
        self._crossing = Crossing(board, self._control, network) if isinstance(network, Network) else None
        self._patience = 0 if board.crosses else SPIN_NS
        self.preparer = Preparer(board, self._control)
        self._async = AsyncProgress(board.segment)
        self.async_progress = self._async.on

    @property
    def calls(self) -> int:
        """Calls that have ended, as interpreters count them."""
        return self._longs[self._completed_at]

    def busy(self) -> bool:
        """True if any collective is under way."""
        return bool(self._queue or self._incoming)

    def _enqueue(self, task: Task) -> None:
        assert isinstance(task, CollectiveTask)
        self._issue(task.call)
        self._incoming.append(task)
        self._accept()

    def _issue(self, call: Call) -> None:
        """Counts and records a call as issued."""
        self._issued = number = self._next_number()
        self._calls[number % len(self._calls)] = call
        self.preparer.issued(self._at, number)

    def _accept(self) -> None:
        """Queues what was issued while another thread held the queue. Lock held."""
        while self._incoming:
            self._queue.append(self._incoming.popleft())

    def submit(self, task: Task, background: bool) -> None:
        """Issues a call, see `CallQueue`; if cores are free for the worker it is left to that at once."""
        if not background or in_listener() or not self._makes_progress():
            super().submit(task, background)
            return
        assert isinstance(task, CollectiveTask)
        self._refuse_reentry(task.call)
        task.site = call_site()
        with self._issuing:
            self._refuse_if_failed()
            self._issue(task.call)
            self.monitor.located(self._issued, task.site)
            self._incoming.append(task)
        self._worker.wake()

    def _makes_progress(self) -> bool:
        """Returns True if calls of the background are left to the worker at once."""
        if not self._async.decided:
            self._async.decide()
            self.async_progress = self._async.on
        return self.async_progress

    def run_now(
        self, part: Part, target: int, source: int, timeout: Callable[[Any], float], options: Any,
        background: bool = False,
    ) -> Task | None:  # fmt: skip
        """Runs a prepared call if the queue is free; else returns None, nothing done. Raises the call's error.

        ``target``, ``source``: the addresses of its output and of its input. If peers are late it becomes a task like
        any other; only then the ``timeout`` of the ``options`` (seconds) is read. In the ``background`` it polls at a
        meeting no longer than moving its data may take, so that calls of ranks in step are complete on return; the task
        it returns may be under way, or have an error.
        """
        prepared, number, task = part[0], 0, None
        entered, acquire, release = self._holding
        if entered():
            self._refuse_reentry(prepared.call)
        if background and prepared.nbytes > INLINE and self._makes_progress():
            return None
        try:
            acquire()  # `with` takes twice as long
            if self._queue or self._incoming or self.failed is not None:
                release()
                return None
            self._issued = number = self._next_number()
            self._calls[number % len(self._calls)] = prepared.call
            patience = patience_for(prepared.call) if background and self._patience else self._patience
            outcome = prepared.run(prepared.address, self._at, number, patience, target, source, 0)
            if outcome == WAITS and self._crossing is not None and not background:
                outcome = self._crossing.run_on(prepared, partial(self._run, *part, 0, True))
            if outcome == DONE:
                if number == self.preparer.compile_at:
                    self.preparer.compile_now()
                release()
                return _ENDED
            task = CollectiveTask(prepared.call, [part], [part[1]], timeout(options))
            task.begun = True
            self._queue.append(task)
            self._go_on(task, outcome, not background)
            release()
            self.leave(task, background)
            return task
        except BaseException as error:
            self._broken_off(part, number, task, error)
            raise

    def _broken_off(self, part: Part, number: int, task: Task | None, error: BaseException) -> None:
        """Ends a call of `run_now` that ``error`` has ended; ``number``: 0 if it has not been issued."""
        if self.entered():
            try:
                if number:
                    keep_shared([part[1]])
                    self._abort(error if isinstance(error, UnisonoError) else interruption(error))
            finally:
                self._lock.release()
        if task is not None and not isinstance(error, UnisonoError):  # no Work of it exists
            self.abandon(task, error)

    def _locate(self, task: Task, site: Site) -> None:
        newest = not self._queue or task is self._queue[-1]
        self.monitor.located(self._issued if newest else self._number_of(task), site)

    def _number_of(self, task: Task) -> int:
        """The number of a call of this queue, from 1."""
        return self.calls + 1 + next((k for k, other in enumerate(self._under_way()) if other is task), 0)

    def _on_rejected(self, task: Task) -> UnisonoError | None:
        """Returns the error for the wait alone: the peers will issue this call, so it goes on in the background."""
        error = self._rejected_error(task, f"{task.call.describe(self._global_ranks)} goes on in the background.")
        if error is not None:
            self._worker.wake()
        return error

    def _under_way(self) -> Sequence[Task]:
        return [*self._queue, *self._incoming]

    @outside_inference
    def _progress(self, spin: bool) -> None:
        queue = self._queue
        self._accept()
        while queue:
            self._go_on(queue[0], None, spin)
            if self.async_progress or (queue and queue[0].begun):  # others wait for the queue, or the call just done
                return
            self._accept()

    def _go_on(self, task: CollectiveTask, outcome: int | None, spin: bool) -> None:
        """Progresses the head of the queue as far as it goes; ``outcome``: of its last run, if there was one."""
        try:
            self._advance(task, outcome, self._patience if spin else 0)
        except ConsensusError as agreed:  # all ranks agree on it: the group stays usable
            if self.failed is None:  # unless a rank did not answer
                self.preparer.completed(self._at)
                self._next(task, agreed.error)
        except UnisonoError as error:
            self._fail(task, error)

    def _advance(self, task: CollectiveTask, outcome: int | None, patience: int) -> None:
        """Raises the call's error."""
        while True:
            prepared, output, tensor = task.parts[0]
            if outcome is None:
                if task.begun and self._crossing is not None and not self._crossing.passes(prepared):
                    return
                outcome = self._run(prepared, output, tensor, patience, task.begun)
                task.begun = True
            if outcome == WAITS:
                if self._crossing is None or not self._crossing.cross(prepared):
                    return
                outcome = None
                continue
            if outcome == DIFFERS:
                self._check(task)
                outcome = None
                continue
            if outcome == LOST:
                if error := self._given_up(task.call):  # it released its tensor before all had read it
                    raise error
            elif outcome == UNREADY:
                self.mappings.map_peers(prepared.root_read)
            outcome = None
            if len(task.parts) > 1:
                del task.parts[0]
                task.begun = False
                continue
            if task.call.refused:
                self._next(task, task.call.mistake(self._global_ranks[self._board.rank]))
            else:
                self._deliver(task)
                self._next(task)
            return

    def _run(self, prepared: Prepared, output: _Memory, tensor: _Memory, patience: int, resumed: bool) -> int:
        """Runs the interpreter once."""
        places = output.data_ptr(), tensor.data_ptr()
        try:
            return prepared.run(prepared.address, self._at, 0, patience, *places, int(resumed))
        except UnisonoError:
            raise
        except (RuntimeError, MemoryError) as error:
            raise internal_error(error) from error

    def _deliver(self, task: CollectiveTask) -> None:
        """Copies results to tensors that no program fills."""
        try:
            for step in task.deliver:
                step()
        except (RuntimeError, MemoryError) as error:
            raise internal_error(error) from error

    def _next(self, task: CollectiveTask, error: UnisonoError | None = None) -> None:
        """Completes the head of the queue."""
        self._end(task, error)  # first: an exception in between must not leave a task that never ends
        self._queue.popleft()
        task.parts.clear()  # a Work that is kept must not keep prepared calls of the group
        if self.calls == self.preparer.compile_at:
            self.preparer.compile_now()

    def _check(self, task: CollectiveTask) -> None:
        """Runs the guard, after the first meeting of a call with unexpected headers. Raises `ConsensusError`."""
        call, headers = task.call, self._board.headers()
        self._comparing = True
        words, agreed = self.monitor.met(call, self.calls + 1, task.site, headers, self._meeting())
        self._comparing = not agreed
        if call.refused and agreed:
            raise ConsensusError(call.mistake(self._global_ranks[self._rank]))
        if words:  # every rank has read the same headers, so every rank is here
            error = MismatchError(words)
            self.monitor.failed(error)
            if not agreed:
                self._abort(error)
            raise ConsensusError(error)
        task.parts[0][0].adapt(headers)

    def _given_up(self, call: Call) -> PeerLostError | None:
        """The error of the call at the head of the queue, if ranks have given it up."""
        number, field, words = self.calls + 1, self._segment.field, "gave the call up while its tensor was in use"
        gone = [rank for rank in range(self._board.size) if self._longs[field(rank, ABORTED)] == number]
        losses = [self.monitor.loss(rank) or Loss(f"rank {self._global_ranks[rank]} {words}") for rank in gone]
        what = f"{call.describe(self._global_ranks)}, call no. {number} of {self._label}, has no result to be trusted"
        return self.monitor.lost(what, losses) if losses else None

    def _meeting(self) -> Callable[[], bool]:
        """A function that arrives at a meeting of no call, and returns whether it is complete; called until it is."""
        alone: Prepared | None = None
        resumed = False

        def meet() -> bool:
            nonlocal alone, resumed
            alone = alone or self.preparer.meeting()
            if resumed and self._crossing is not None and not self._crossing.passes(alone):
                return False
            outcome = alone.run(alone.address, self._at, 0, self._patience, 0, 0, int(resumed))
            resumed = True
            if outcome == WAITS and self._crossing is not None:
                self._crossing.cross(alone, words=True)
            return outcome == DONE

        return meet

    def _sleep(self, seconds: float) -> None:
        if not self._queue or self._queue[0].begun:  # else a call can begin at once
            self._board.sleep(seconds)

    def _check_peers(self) -> None:
        if not self._queue:
            return
        task, board = self._queue[0], self._board
        missing = board.missing()
        gone = self.monitor.losses(missing)
        if board.full():  # they arrived in the meantime
            return
        if gone:
            self._fail_lost_peer(task, self.monitor.lost(self.explain(task, "can not end"), gone))
        elif not missing and (error := self._given_up(task.call)):
            self._fail_lost_peer(task, error)
        elif words := task.overdue():
            self._fail(task, self._late(task, words))

    def _needs(self, task: Task) -> list[Identity]:
        """The missing processes that have not issued the call at the head of the queue.

        Not this one, where it is two ranks of a group: another thread of it may issue the call.
        """
        board, number = self._board, self.calls + 1
        missing = [r for r in board.missing() if board.segment.issued(r) < number]
        return [who for rank in missing if (who := board.segment.process(rank)) != Identity.mine()]

    def explain(self, task: Task, what: str, placed: bool = True) -> str:
        """Describes a call that did not end; see `CallQueue`."""
        absent = [self._global_ranks[r] for r in self._board.missing()]
        number = self._number_of(task)
        late = f"{name_ranks(absent)} missing" if absent else "all ranks are there"
        place = (placed and task.place()) or ","
        return f"{task.call.describe(self._global_ranks)}, call no. {number} of {self._label}{place} {what}: {late}"

    def _late(self, task: Task, what: str) -> CollectiveTimeout:
        missing = self._board.missing()
        here = ", ".join(str(name) for rank, name in enumerate(self._global_ranks) if rank not in missing)
        return self.monitor.late(f"{self.explain(task, what)} (arrived: {here or 'none'})", missing)

    def _fail(self, task: Task, error: UnisonoError) -> None:
        self.monitor.failed(error)
        self._abort(error)

    def _abort(self, error: UnisonoError) -> None:
        incomplete = self.failed is None and not self._comparing and self._control.arrived
        super()._abort(error)
        if incomplete and not self._board.full():  # who comes later must not complete the call
            self._board.arrive(self._board.position[0], count=-1)

    def _fail_all(self, error: UnisonoError) -> None:
        self._longs[self._aborted_at] = self.calls + 1
        with self._issuing:
            self._accept()
        while self._queue:
            task = self._queue[0]
            if not task.done:
                keep_shared(task.outputs)
                self._end(task, error)
            self._queue.popleft()
            task.parts.clear()


_ENDED = Task(Call("barrier"), [], 0.0)
_ENDED.done = True
"""The task of every call that was complete at once."""

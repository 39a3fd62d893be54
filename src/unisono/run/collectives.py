"""The lane of collectives: first come, first served, one meeting at a time, every call guarded."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.errors import CollectiveTimeout, MismatchError, UnisonoError
from unisono.run.desk import Desk, Order
from unisono.run.fused_words import DONE, UNSURE, WAITS
from unisono.run.lane import Lane
from unisono.run.offers import AGAIN, DIRECT, STAGED, Offers
from unisono.run.outcome import Agreed, broken, keep_shared
from unisono.run.parley import parley
from unisono.run.prepared import Ordered, Prepared, Ticket, brief
from unisono.run.programs import Program
from unisono.run.reentry import interruption
from unisono.run.task import Task
from unisono.transport.board import Board
from unisono.transport.futex import LINGER
from unisono.transport.inference import outside_inference
from unisono.transport.layout import ABANDONED
from unisono.transport.process import Identity
from unisono.transport.segment import (
    COMPLETED,
    COMPLETED_AT,
    HEADER,
    ISSUED,
    ISSUED_AT,
    MOMENTS,
)
from unisono.watch.account import lateness, losses
from unisono.watch.call import Call, Site, call_site
from unisono.watch.farewell import lost
from unisono.watch.flight import CollectiveRecord
from unisono.watch.guard import Disagreement, disagreement

__all__ = ["CollectiveLane"]


class CollectiveLane(Lane):
    """Runs programs (run/programs.py) over a board, in the order in which they were issued."""

    def __init__(self, board: Board, names: Sequence[int], label: str) -> None:
        super().__init__(board.segment, board.rank, names, label)
        self._board = board
        self._queue: deque[Task] = deque()
        self._arrived = False  # at the meeting that the head of the queue waits for
        self._fresh = True  # the head of the queue has not met its peers yet
        self.calls = 0  # completed
        layout = board.segment.layout
        self._header_nbytes = layout.header
        self._spans = [
            (
                board.header_span(half, board.rank),
                board.header_span(half, 0)[0],
                board.header_span(half, board.size - 1)[1],
            )
            for half in (0, 1)
        ]
        self._headers: dict[int, tuple[Call, bytes, bytes]] = {}
        self._longs, self._issued, record = board.segment.longs, 0, board.segment.field(board.rank, 0)
        self._moments_at = record + ISSUED_AT
        self._issued_at, self._completed_at = record + ISSUED, record + COMPLETED
        self._abandoned_at = record + ABANDONED
        self._moment_at, self._header_at = record + COMPLETED_AT, record + HEADER
        self._flight = CollectiveRecord(label, names, board.rank, _counts(board), board.segment.nonce)
        self.offers = Offers(board, names, label)
        self.desk = Desk(board, self._flight, self.offers)

    def busy(self) -> bool:
        """Whether any collective is under way."""
        return bool(self._queue)

    def _enqueue(self, task: Task) -> None:
        self._count(task.call)
        self._queue.append(task)

    def _count(self, call: Call) -> None:
        """One more call issued."""
        number = self._issued = self._issued + 1
        now = self._longs[self._moments_at + number % MOMENTS] = time.monotonic_ns()
        flight = self._flight
        place = number % len(flight.calls)
        flight.calls[place], flight.moments[place] = call, now
        self._longs[self._issued_at] = number

    def order(self, order: Order, output: torch.Tensor, tensor: torch.Tensor, timeout: float) -> Task:
        """The call of an order as a task, for a lane that is not free."""
        return Ordered(order, output, tensor, timeout)

    def at_once(
        self,
        prepared: Prepared,
        output: torch.Tensor,
        tensor: torch.Tensor,
        timeout: Callable[[Any], float],
        options: Any,
        background: bool = False,
    ) -> Task | None:
        """Carries a prepared call out, if the lane is free; else returns None, nothing done. Raises the call's error.

        Where the peers do not come at once it becomes a task like any other; only then is it asked what the ``timeout``
        of the ``options`` is (seconds). In the ``background`` it waits at a meeting no longer than moving its data may
        take, so that calls of ranks that walk in step are done when they return; the task it returns may be under way,
        or have an error.
        """
        if self.entered():
            self._alone(prepared.call)
        begin: Any = self._run if isinstance(prepared, Order) else self._express
        task: Task | None = None
        try:
            with self._lock:
                if self._queue or self.failed is not None:
                    return None
                try:
                    steps = begin(prepared, output, tensor, brief(prepared.call) if background else LINGER)
                    if steps is None:
                        return _ENDED
                    task = Task(prepared.call, steps, [output], timeout(options))
                    self._queue.append(task)
                except Agreed as agreed:  # all ranks have met over it: the group stays usable
                    self._account()
                    if not background:
                        raise agreed.error from None
                    task = Task(prepared.call, None, [output], 0.0)
                    self._end(task, agreed.error)
                except BaseException as error:
                    keep_shared([output])
                    self._give_up(error if isinstance(error, UnisonoError) else interruption(error))
                    raise
                if task.done:
                    return task
                if background:
                    task.site = call_site()
                    self._locate(task, task.site)
            if background:
                self._wake_worker()
            else:
                self.finish(task, held=False)
        except UnisonoError:
            raise
        except BaseException as error:  # nobody can take it up again
            if task is not None:
                self.abandon(task, error)
            raise
        return task

    def _express(self, ticket: Ticket, output: torch.Tensor, tensor: torch.Tensor, patience: float) -> Program | None:
        """Carries a call of one meeting as far as it goes: what is left of it. Lock held."""
        board, call = self._board, ticket.call
        half = board.meetings & 1
        self._count(call)
        ticket.stage(half, output, tensor)
        self._post(call)
        board.arrive()
        self._arrived = True
        if not board.linger(patience):
            return ticket.rest(half, output, tensor)
        self._fresh = self._arrived = False
        self._check(call, None)
        ticket.collect(half, output, tensor)
        self._account()
        return None

    def _run(self, order: Order, output: torch.Tensor, tensor: torch.Tensor, patience: float) -> Program | None:
        """As `_express`, all of it in one call of the compiled loops. Raises what its headers tell. Lock held."""
        calls, number = self._flight.calls, self._issued + 1
        self._issued, calls[number % len(calls)] = number, order.call
        return self._loop(order, output, tensor, patience, number)

    def _loop(
        self,
        order: Order,
        output: torch.Tensor,
        tensor: torch.Tensor,
        patience: float,
        number: int = 0,
        site: Site | None = None,
    ) -> Program | None:
        """Carries a call as far as it goes: what is left of it. ``number``: 0 if it has been noted as issued."""
        board, desk, meeting = self._board, self.desk, self._board.meetings
        into = output.data_ptr()
        outcome = order.run(
            desk.address, order.address, order.header, number, self.calls, meeting, int(1e9 * patience),
            into, into if tensor is output else tensor.data_ptr(),
        )  # fmt: skip
        if outcome == DONE:
            board.meetings = meeting + order.meetings
            self.calls += 1
            return None
        step, mode, outcome = outcome >> 4, outcome >> 2 & 3, outcome & 3
        if mode == AGAIN:
            meeting += 1
        if outcome in (DONE, UNSURE):
            board.meetings = meeting + (order.rounds + 1 if mode >= DIRECT else order.meetings)
            if outcome == UNSURE:
                desk.settle(order, mode)
            self.calls += 1
            return None
        met = step > 0 or mode > STAGED
        self._arrived = outcome == WAITS
        board.meetings = meeting + step + (not self._arrived)
        self._fresh = self._arrived and not met
        if not self._arrived:  # headers differ
            self._check(order.call, site)
        return desk.steps(order, output, tensor, meeting, step, mode, met)

    def _locate(self, task: Task, site: Site) -> None:
        queue = self._queue
        newest = not queue or task is queue[-1]
        self._flight.locate(self._issued if newest else self.calls + 1 + queue.index(task), site)

    def _interrupt(self, task: Task) -> UnisonoError | None:
        """The others will come to this call, so it goes on in the background."""
        error = self._complaint(task, f"{task.call.describe(self._names)} goes on in the background.")
        if error is not None:
            self._wake_worker()
        return error

    def _under_way(self) -> Sequence[Task]:
        return list(self._queue)

    @outside_inference
    def _carry(self, linger: bool) -> None:
        queue = self._queue
        while queue:
            task = queue[0]
            try:
                if not self._advance(task, linger):
                    return
            except Agreed as agreed:  # all ranks have met over it: the group stays usable
                if self.failed is None:  # unless one could not be heard
                    self._next(task, agreed.error)
            except UnisonoError as error:
                self._fail(task, error)

    def _advance(self, task: Task, linger: bool) -> bool:
        """Carries the head of the queue; whether it is done. Raises its error."""
        board = self._board
        while True:
            if not self._arrived:
                if self._fresh and task.steps is None:
                    if self._begin(task, linger):
                        return True
                    continue
                if self._fresh:
                    self._post(task.call)
                if self._step(task):
                    self._next(task)
                    return True
                board.arrive()
                self._arrived = True
            if not (board.complete() or (linger and board.linger())):
                return False
            self._arrived = False
            if self._fresh:
                self._fresh = False
                self._check(task.call, task.site)

    def _step(self, task: Task) -> bool:
        """Runs the program of a call up to its next meeting; whether it has ended."""
        try:
            return next(task.steps, self) is self
        except UnisonoError:
            raise
        except (RuntimeError, MemoryError) as error:
            raise broken(error) from error

    def _begin(self, task: Task, linger: bool) -> bool:
        """Gives the head of the queue, an order, to the compiled loops; whether it is done."""
        assert isinstance(task, Ordered)
        task.steps = self._loop(task.order, task.output, task.tensor, LINGER if linger else 0.0, site=task.site)
        if task.steps is None:
            self._queue.popleft()
            self._end(task)
        return task.done

    def _next(self, task: Task, error: UnisonoError | None = None) -> None:
        self._queue.popleft()
        self._account()
        self._end(task, error)

    def _account(self) -> None:
        """One more call completed; the next one has not met its peers."""
        self._fresh, self._arrived = True, False
        self.calls += 1
        self._longs[self._completed_at] = self.calls
        now = self._longs[self._moment_at] = time.monotonic_ns()
        ends = self._flight.ends
        ends[self.calls % len(ends)] = now
        if self.calls == self.desk.open_at:
            self.desk.warm()

    def _post(self, call: Call) -> None:
        """Lays the call's header next to the data."""
        board = self._board
        (start, stop), _, _ = self._spans[board.half]
        board.segment.raw[start:stop] = self._header(call)[0]
        self._longs[self._header_at] = start

    def _header(self, call: Call) -> tuple[bytes, bytes]:
        """A call's header, and what all headers look like if every rank calls the same; cached, calls repeat."""
        found = self._headers.get(id(call))
        if found is None or found[0] is not call:
            if len(self._headers) > 1024:
                self._headers.clear()
            header = call.header(self._board.size, self._header_nbytes)
            found = self._headers[id(call)] = (call, header, header * self._board.size)
        return found[1], found[2]

    def _check(self, call: Call, site: Site | None) -> None:
        """The guard, after the first meeting of a call. Raises `Agreed`."""
        board = self._board
        _, start, stop = self._spans[1 - board.half]
        headers = board.segment.raw[start:stop]
        if headers != self._header(call)[1] or call.sends or call.refused:
            found = disagreement(call, headers, board.size, self._names)
            if found is not None:
                self._report(call, site, found)
            if call.refused:
                raise Agreed(call.mistake(self._names[board.rank]))

    def _report(self, call: Call, issued: Site | None, found: Disagreement) -> None:
        """Every rank has seen the same headers, so every rank comes here: tell each other in words, then raise."""
        number, place = self.calls + 1, issued or call_site()
        if issued is None:
            self._flight.locate(number, place)
        text, agreed = parley(self._board, self._names, self._label, number, call, place, found)
        if agreed and call.refused:
            raise Agreed(call.mistake(self._names[self._board.rank]))
        error = MismatchError(text)
        self._save_record(error)
        if not agreed:
            self._give_up(error)
        raise Agreed(error)

    def _nap(self, seconds: float) -> None:
        self._board.sleep(seconds)

    def _look_around(self) -> None:
        task, board = self._queue[0], self._board
        gone = losses(board.segment, board.missing(), self._names)
        if board.full():  # they came in the meantime
            return
        if gone:
            self._fail(task, lost(self.explain(task, "can not end", briefly=True), gone))
        elif time.monotonic() > task.deadline:
            waited = task.deadline - task.issued
            self._fail(task, CollectiveTimeout(self.explain(task, f"did not end within its timeout of {waited:g} s")))

    def _needs(self, task: Task) -> list[Identity]:
        """Those who are missing and have not issued the call that the head of the queue is."""
        board, number = self._board, self.calls + 1
        missing = [r for r in board.missing() if self._longs[board.segment.field(r, ISSUED)] < number]
        return [board.segment.identity(rank) for rank in missing]

    def explain(self, task: Task, what: str, briefly: bool = False, placed: bool = True) -> str:
        """A call that did not end; see `Lane`."""
        board = self._board
        missing = board.missing()
        absent = [self._names[r] for r in missing]
        here = [n for n in self._names if n not in absent]
        number = self.calls + 1 + (self._queue.index(task) if task in self._queue else 0)
        late = (
            f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))} missing" if absent else "all ranks are there"
        )
        place = (placed and task.place()) or ","
        text = f"{task.call.describe(self._names)}, call no. {number} of {self._label}{place} {what}: {late}"
        if briefly:
            return text
        arrived = f" (arrived: {', '.join(map(str, here)) or 'none'})"
        return text + arrived + lateness(board.segment, self._watch, missing, self._names, 0.3)

    def _fail(self, task: Task, error: UnisonoError) -> None:
        self._save_record(error)
        self._give_up(error)

    def _fail_all(self, error: UnisonoError) -> None:
        self._longs[self._abandoned_at] = self.calls + 1
        while self._queue:
            task = self._queue.popleft()
            keep_shared(task.outputs)
            self._end(task, error)


_ENDED = Task(Call("barrier"), None, [], 0.0)
_ENDED.done = True
"""Stands for every call that was done at once."""


def _counts(board: Board) -> Callable[[], tuple[int, int, int]]:
    """Tells how many calls this rank has issued and completed, and how many any rank has issued at most."""
    longs, everybody = board.segment.longs, [board.segment.field(rank, ISSUED) for rank in range(board.size)]
    issued, completed = everybody[board.rank], board.segment.field(board.rank, COMPLETED)
    return lambda: (longs[issued], longs[completed], max(longs[place] for place in everybody))

"""The lane of collectives: first come, first served, one meeting at a time, every call guarded."""

import time
from collections import deque
from collections.abc import Sequence

from unisono.errors import CollectiveTimeout, MismatchError, PeerLostError, UnisonoError, UsageError
from unisono.run.lane import Lane, Task
from unisono.transport.board import LEFT, Board
from unisono.watch.call import call_site
from unisono.watch.guard import Disagreement, disagreement, table
from unisono.watch.peers import alive

__all__ = ["CollectiveLane"]


class CollectiveLane(Lane):
    """Runs programs (run/programs.py) over a board, in the order in which they were issued."""

    def __init__(self, board: Board, names: Sequence[int], label: str) -> None:
        super().__init__(label)
        self._board, self._names, self._label = board, names, label
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
        self._headers: dict[int, tuple[object, bytes, bytes]] = {}

    def busy(self) -> bool:
        """Whether any collective is under way."""
        return bool(self._queue)

    def _enqueue(self, task: Task) -> None:
        self._queue.append(task)

    def _carry(self, linger: bool) -> None:
        queue = self._queue
        while queue:
            task = queue[0]
            try:
                if not self._advance(task, linger):
                    return
            except (MismatchError, UsageError) as error:  # all ranks have met over it: the group stays usable
                self._next(task, error)
            except Exception as error:
                self._fail(task, error if isinstance(error, UnisonoError) else _broken(error))

    def _advance(self, task: Task, linger: bool) -> bool:
        """Carries the head of the queue; whether it is done. Raises its error."""
        board = self._board
        while True:
            if not self._arrived:
                if self._fresh:
                    self._post(task)
                if next(task.steps, self) is self:
                    self._next(task)
                    return True
                board.arrive()
                self._arrived = True
            if not (board.complete() or (linger and board.linger())):
                return False
            self._arrived = False
            if self._fresh:
                self._fresh = False
                self._check(task)

    def _next(self, task: Task, error: UnisonoError | None = None) -> None:
        self._queue.popleft()
        self._fresh, self._arrived = True, False
        self.calls += 1
        self._end(task, error)

    def _post(self, task: Task) -> None:
        """Lays the call's header next to the data."""
        call, board = task.call, self._board
        (start, stop), _, _ = self._spans[board.half]
        board.segment.raw[start:stop] = self._header(call)[0]

    def _header(self, call: object) -> tuple[bytes, bytes]:
        """A call's header, and what all headers look like if every rank calls the same; cached, calls repeat."""
        found = self._headers.get(id(call))
        if found is None or found[0] is not call:
            if len(self._headers) > 1024:
                self._headers.clear()
            header = call.header(self._board.size, self._header_nbytes)  # type: ignore[attr-defined]
            found = self._headers[id(call)] = (call, header, header * self._board.size)
        return found[1], found[2]

    def _check(self, task: Task) -> None:
        """The guard, after the first meeting of a call."""
        board, call = self._board, task.call
        _, start, stop = self._spans[1 - board.half]
        headers = board.segment.raw[start:stop]
        if headers != self._header(call)[1] or call.sends or call.refused:
            found = disagreement(call, headers, board.size, self._names)
            if found is not None:
                self._report(task, found)
            if call.refused:
                raise UsageError(call.refused)

    def _report(self, task: Task, found: Disagreement) -> None:
        """Every rank has seen the same headers, so every rank comes here: tell each other in words, then raise."""
        board, number = self._board, self.calls + 1
        site = task.site or call_site()
        board.segment.say(board.rank, f"{number}\n{task.call.describe(self._names)}\n{site}")
        board.arrive()
        limit = time.monotonic() + 1.0
        while not (board.complete() or board.linger()) and time.monotonic() < limit:
            board.sleep(0.1)
        rows = []
        for rank, name in enumerate(self._names):
            words = board.segment.text(rank).split("\n")
            call, site = (
                (words[1], words[2]) if words[0] == str(number) and len(words) == 3 else ("(no word from it)", "")
            )
            rows.append((name, call, site))
        if task.call.refused:
            raise UsageError(task.call.refused)
        lines = "".join(f"\n  {line}" for line in found.lines)
        raise MismatchError(
            f"the ranks of {self._label} disagree about call no. {number}:\n"
            f"{table(rows, [self._names[r] for r in found.odd])}{lines}\n"
            "Nothing was changed and the group can still be used; all ranks must make the same call."
        )

    def _nap(self, seconds: float) -> None:
        self._board.sleep(seconds)

    def _look_around(self) -> None:
        task, now = self._queue[0], time.monotonic()
        lost = self._lost()
        if lost:
            self._fail(task, PeerLostError(f"{self.explain(task, 'can not end')}; {lost}"))
        elif now > task.deadline:
            waited = task.deadline - task.issued
            self._fail(task, CollectiveTimeout(self.explain(task, f"did not end within {waited:g} s")))

    def _lost(self) -> str:
        """Words on the ranks that are missing and will not come any more."""
        board, words = self._board, []
        for rank in board.missing():
            who = board.segment.identity(rank)
            if who.pid and board.segment.longs[board.segment.field(rank, 2)] == LEFT:
                words.append(f"rank {self._names[rank]} (pid {who.pid}) has left the group")
            elif who.pid and not alive(who):
                words.append(f"rank {self._names[rank]} (pid {who.pid}) is dead")
        return ", ".join(words)

    def explain(self, task: Task, what: str) -> str:
        """One line on a call that did not end: what it is, who is missing and how far they came."""
        board = self._board
        missing = [self._names[r] for r in board.missing()]
        here = [n for n in self._names if n not in missing]
        late = "; ".join(f"rank {n} is missing" for n in missing)
        ahead = self._queue.index(task) if task in self._queue else 0
        number = self.calls + 1 + ahead
        return (
            f"{task.call.describe(self._names)}, call no. {number} of {self._label}, {what}: "
            f"{late or 'all ranks are there'} (arrived: {', '.join(map(str, here)) or 'none'})"
        )

    def _fail(self, task: Task, error: UnisonoError) -> None:
        self.failed = error
        self._fail_all(error)

    def _fail_all(self, error: UnisonoError) -> None:
        while self._queue:
            self._end(self._queue.popleft(), error)


def _broken(error: Exception) -> UnisonoError:
    wrapped = UnisonoError(f"a collective broke off inside: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped

"""The interpreter of programs over shared memory: one loop, which numba compiles and Python runs as it is.

`interpreter` builds it from a set of primitives, `Primitives`: compiled ones (compiled_ops.py), or torch's operations
(torch_ops.py), for dtypes that have no loops and where numba is missing. A meeting, the comparison of headers, the
timestamps and the zero-copy decision are thus written once, and ranks on either set meet each other.

A run goes as far as it can: it returns `WAITS` if a peer is late by more than ``patience`` ns, and is called again to
go on; the control block (words.py) holds its state. It does not check for lost peers: the queue does.

A meeting is an atomic add. The last rank to arrive wakes the sleepers: its add comes before its FUTEX_WAKE, and
FUTEX_WAIT compares the word again under the kernel's lock.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from unisono.program.bind import (
    COPY,
    DST,
    KIND,
    LAG,
    LEFT,
    MEET,
    MOST,
    SHRINK,
    SRC,
    SRC_AT,
    SRC_STEP,
    SUM,
    WIDEN,
    WORDS,
)
from unisono.runtime import words as w
from unisono.runtime.past_caches import staging_copy
from unisono.runtime.zero_copy import DIRECT, PUSHED, RETRY_STAGED, STAGED, ZeroCopy, zero_copy
from unisono.transport.layout import Layout

__all__ = ["Interpreter", "Primitives", "interpreter"]

_COUNTER_LINES = Layout.COUNTER_LINES


@dataclass(frozen=True, slots=True)
class Primitives:
    """The operations that the loop is built from; addresses, counts and words are integers.

    ``inner`` decorates a function of the loop. ``words(address, count)``: 64-bit words, to be indexed.
    ``arrive(address, full)`` adds one to a 32-bit word, after everything before, and wakes its sleepers if that makes
    it full. ``relax()`` is called between two polls of a word. ``store(address, value)`` stores a 64-bit word that
    others may read at any time. ``now()``: ``time.monotonic_ns``. ``pause(address, seen, limit, oversubscribed)``
    yields the core once, or sleeps on a word that is still ``seen``; ``sleep(address, seen, nanoseconds)`` does the
    latter. ``ring(address)`` adds one to a 32-bit word, after everything before, and wakes its sleepers. ``equal(one,
    other, nbytes)``, ``copy(target, source, nbytes)``: of bytes, equal of whole words; ``copy_past``: past the caches,
    where that can be. ``widen`` and ``narrow``
    ``(target, source, nbytes, sample)`` bring elements of the user's dtype, ``nbytes`` of them, into accumulators and
    back. ``combine(scratch, places, parts, targets, nbytes, op, size, sample)`` combines the first ``parts`` of the
    addresses ``places``, in that order, into the ``targets`` that follow; each is followed, ``parts + targets`` words
    on, by whether it holds accumulators; an AVG is divided by ``size``, if that is not 0. ``slowness``: how many times
    as long as compiled loops these take.
    """

    inner: Callable[[Any], Any]
    words: Callable[[int, int], Any]
    arrive: Callable[[int, int], Any]
    load_acquire32: Callable[[int], int]
    load_acquire64: Callable[[int], int]
    relax: Callable[[], Any]
    store_release32: Callable[[int, int], Any]
    store_release64: Callable[[int, int], Any]
    store: Callable[[int, int], Any]
    now: Callable[[], int]
    pause: Callable[[int, int, int, int], Any]
    sleep: Callable[[int, int, int], Any]
    ring: Callable[[int], Any]
    equal: Callable[[int, int, int], bool]
    copy: Callable[[int, int, int], Any]
    copy_past: Callable[[int, int, int], Any]
    widen: Callable[..., Any]
    narrow: Callable[..., Any]
    combine: Callable[..., Any]
    slowness: int = 1


class Interpreter(NamedTuple):
    """The functions of an interpreter, on addresses and numbers."""

    run: Callable[..., int]
    """(call, control, number, patience, target, source, resumed, sample)."""
    issued: Callable[..., int]
    """(control, number): notes that call ``number`` was issued."""
    completed: Callable[..., int]
    """(control): notes that a call has ended."""


def interpreter(p: Primitives) -> Interpreter:
    """The interpreter made of primitives."""
    words, agreed = p.words, zero_copy(p)
    begin = _beginning(p, agreed)
    issued, completed = _timestamps(p)
    interpret = _going_on(p, agreed, completed)

    def run(
        call_at: int, control_at: int, number: int, patience: int, target: int, source: int, resumed: int, sample: Any
    ) -> Any:
        """Runs the prepared call at ``call_at``, as call no. ``number`` of this rank.

        ``number``: 0 if it has been noted as issued; ``patience``: ns it may wait at a meeting; ``target``, ``source``:
        addresses of output and input, or of tables of their addresses; ``resumed``: whether to go on with the call
        under way; if its headers were not as expected, the guard has found them to agree.
        """
        call, control = words(call_at, w.CALL_WORDS), words(control_at, w.CONTROL_WORDS)
        if resumed == 0:
            if number > 0:
                issued(control, number)
            begin(call, control, target, source)
        return interpret(call, control, patience, sample)

    return Interpreter(
        run,
        lambda control_at, number: issued(words(control_at, w.CONTROL_WORDS), number),
        lambda control_at: completed(words(control_at, w.CONTROL_WORDS)),
    )


def _going_on(p: Primitives, agreed: ZeroCopy, completed: Any) -> Any:
    """Builds ``interpret``, which runs a call that has begun as far as it goes."""
    words, choose, walk = p.words, _choosing(p, agreed), _walking(p)
    differ, aborted, load = _comparing(p), agreed.aborted, p.load_acquire64

    @p.inner
    def interpret(call: Any, control: Any, patience: int, sample: Any) -> Any:
        """Goes on with a call that has begun."""
        guarded = call[w.HEADER_AT] > 0
        while True:
            if control[w.PHASE] == 1:
                choose(call, control)
            outcome = walk(call, control, patience, sample)
            if outcome != w.DIFFERS:
                break
            if guarded and differ(call, control, control[w.FIRST_MEETING] & 1):
                return outcome
        if outcome == w.WAITS:
            return outcome
        if control[w.PATH] >= DIRECT and aborted(control, words(control[w.COMPLETED], 1)[0] + 1):
            return w.ABORTED
        if call[w.COMPLETES] > 0:
            completed(control)
        if control[w.UNMAPPED] > 0:
            return w.UNREADY
        return w.REFUSED if call[w.COMPLETES] > 0 and load(control[w.REFUSED_AT]) != 0 else w.DONE

    return interpret


def _beginning(p: Primitives, agreed: ZeroCopy) -> Any:
    """Builds ``begin``, which publishes a call."""
    words, store, copy, equal, publish = p.words, p.store, p.copy, p.equal, agreed.publish

    @p.inner
    def begin(call: Any, control: Any, target: int, source: int) -> None:
        """Publishes the header and the handle of a call, and sets the bases of its tensors."""
        meeting, size = words(control[w.POSITION], 1)[0], control[w.SIZE]
        control[w.FIRST_MEETING], control[w.ITERATION], control[w.ROW], control[w.ARRIVED] = meeting, 0, 0, 0
        control[w.PHASE], control[w.PATH], control[w.UNMAPPED] = 0, STAGED, 0
        control[w.TABLE] = call[w.STAGED]
        bases = words(control[w.BASES], control[w.BASES_COUNT])
        output = control[w.OUTPUT_BASE]
        bases[0], bases[output], bases[control[w.TEMP_BASE]] = source, target, call[w.TEMP]
        if call[w.LISTED] & w.INPUTS:
            places = words(source, call[w.IN_BLOCKS])
            for block in range(call[w.IN_BLOCKS]):
                bases[block] = places[block]
        if call[w.LISTED] & w.OUTPUTS:
            places = words(target, call[w.OUT_BLOCKS])
            for block in range(call[w.OUT_BLOCKS]):
                bases[output + block] = places[block]
        if call[w.HEADER_AT] > 0:
            mine = control[w.HEADERS] + ((meeting & 1) * size + control[w.RANK]) * control[w.HEADER]
            header = call[w.HEADER_AT] + call[w.STRIDE] * control[w.RANK]
            if not equal(mine, header, control[w.HEADER]):  # else its lines stay in the caches of those who read it
                copy(mine, header, control[w.HEADER])
            store(control[w.HEADER_OFFSET], mine - control[w.BASE])
        if call[w.PUBLISHES] > 0 and publish(call, control, bases, meeting):
            control[w.TABLE] = call[w.DIRECT]  # a speculative call stages nothing

    return begin


def _choosing(p: Primitives, agreed: ZeroCopy) -> Any:
    """Builds ``choose``, which picks the table after the first meeting."""
    words, decide = p.words, agreed.decide

    @p.inner
    def choose(call: Any, control: Any) -> None:
        """Picks the table and the row to go on with, after the first meeting and the guard."""
        control[w.PHASE] = 2
        meeting, path = control[w.FIRST_MEETING], STAGED
        if call[w.PUBLISHES] > 0:
            path = decide(call, control, words(control[w.BASES], control[w.BASES_COUNT]), meeting)
        control[w.PATH] = path
        if path == RETRY_STAGED:
            control[w.FIRST_MEETING], control[w.ROW] = meeting + 1, 0
            control[w.TABLE] = call[w.STAGED]
            return
        table = call[w.STAGED]
        if path == DIRECT:
            table = call[w.DIRECT]
        elif path == PUSHED:
            table = call[w.PUSHED]
        scalars = words(table, w.SCALARS)
        rows = words(table + 8 * w.SCALARS, scalars[w.TABLE_ROWS] * WORDS)
        at = 0
        while rows[at + KIND] != MEET:
            at += WORDS
        control[w.TABLE], control[w.ROW] = table, at + WORDS

    return choose


def _walking(p: Primitives) -> Any:
    """Builds ``walk``, which runs the rows of a table."""
    words, meet, execute = p.words, _meeting(p), _executing(p)

    @p.inner
    def walk(call: Any, control: Any, patience: int, sample: Any) -> Any:
        """Runs rows to the end, or to a meeting that is not complete in time."""
        size = control[w.SIZE]
        bases = words(control[w.BASES], control[w.BASES_COUNT])
        table = control[w.TABLE]
        scalars = words(table, w.SCALARS)
        count, pieces = scalars[w.TABLE_ROWS] * WORDS, scalars[w.TABLE_PIECES]
        rows = words(table + 8 * w.SCALARS, count)
        position = words(control[w.POSITION], 1)
        i, k = control[w.ITERATION], control[w.ROW]
        shift = control[w.FIRST_MEETING] // 2 % call[w.WINDOWS] * call[w.WINDOW]
        while i < pieces + scalars[w.TABLE_LAGS]:
            flip = (((control[w.FIRST_MEETING] + i * scalars[w.TABLE_MEETS]) & 1) + call[w.INLINE]) * size
            while k < count:
                if rows[k + KIND] != MEET:
                    k = execute(call, control, bases, rows, k, i, pieces, flip, shift, sample)
                    continue
                if i < pieces + rows[k + LEFT]:
                    if not meet(control, position[0], patience):
                        control[w.ITERATION], control[w.ROW] = i, k
                        return w.WAITS
                    position[0] += 1
                    if control[w.PHASE] == 0:
                        control[w.PHASE] = 1
                        return w.DIFFERS
                k += WORDS
            k = 0
            i += 1
        return w.DONE

    return walk


def _meeting(p: Primitives) -> Any:
    """Builds ``meet``."""
    arrive, load, now, pause = p.arrive, p.load_acquire32, p.now, p.pause
    relax, slowness = p.relax, p.slowness
    store_release32, store_release64 = p.store_release32, p.store_release64

    @p.inner
    def counter(control: Any, meeting: int) -> Any:
        """The address of a meeting's counter: `Layout.counter`."""
        return control[w.COUNTERS] + _COUNTER_LINES * (meeting & 1) + 8 * (meeting >> 1 & 1)

    @p.inner
    def meet(control: Any, meeting: int, patience: int) -> bool:
        """Arrives at a meeting, once, and polls for ``patience`` ns; returns whether all ranks have arrived."""
        full = control[w.FULL]
        here = counter(control, meeting)
        if control[w.ARRIVED] == 0:
            if control[w.RESETS] > 0:  # no rank polls the counter of two meetings ago, which lies in the same line
                store_release32(counter(control, meeting + 2), 0)
            arrive(here, full)  # first: a rank killed in between must not count as arrived
            store_release64(control[w.MEETINGS_BEGUN], meeting + 1)
            control[w.ARRIVED] = 1
        spins, most = 0, control[w.SPINS] // slowness
        while spins < most and load(here) != full:
            relax()
            spins += 1
        if spins == most:
            limit = now() + patience
            there = load(here)
            while there != full:
                if now() > limit:
                    return False
                pause(here, there, limit, control[w.OVERSUBSCRIBED])
                there = load(here)
        control[w.ARRIVED] = 0
        return True

    return meet


def _comparing(p: Primitives) -> Any:
    """Builds ``differ``."""
    equal = p.equal

    @p.inner
    def differ(call: Any, control: Any, parity: int) -> bool:
        """Returns True if a rank's header at the first meeting is not the expected one."""
        nbytes, size = control[w.HEADER], control[w.SIZE]
        theirs = control[w.HEADERS] + parity * size * nbytes
        for rank in range(size):
            if not equal(call[w.HEADER_AT] + call[w.STRIDE] * rank, theirs + rank * nbytes, nbytes):
                return True
        return False

    return differ


def _timestamps(p: Primitives) -> tuple[Any, Any]:
    """Builds ``issued`` and ``completed``: the counts and times of calls, for peers and the flight record."""
    words, now, store = p.words, p.now, p.store

    @p.inner
    def issued(control: Any, number: int) -> int:
        moment = now()
        store(control[w.ISSUED_AT] + 8 * (number % control[w.ISSUED_KEPT]), moment)
        store(control[w.ISSUE_TIMES] + 8 * (number % control[w.KEPT]), moment)
        store(control[w.ISSUED], number)
        return 0

    @p.inner
    def completed(control: Any) -> int:
        moment, number = now(), words(control[w.COMPLETED], 1)[0] + 1
        store(control[w.COMPLETED], number)
        store(control[w.COMPLETED_AT], moment)
        store(control[w.END_TIMES] + 8 * (number % control[w.KEPT]), moment)
        return 0

    return issued, completed


def _executing(p: Primitives) -> Any:
    """Builds ``execute``, which runs a row other than a meeting for one piece."""
    words, copy, widen, narrow, combine = p.words, p.copy, p.widen, p.narrow, p.combine
    stage = staging_copy(p, w.PAST_CACHES)

    @p.inner
    def place(bases: Any, rows: Any, at: int, piece: int, flip: int, shift: int, stages: int) -> Any:
        """The address that three words of a row give."""
        base, start = rows[at], rows[at + 1] + piece * rows[at + 2]
        return bases[base + flip] + shift + start if base >= stages else bases[base] + start

    @p.inner
    def execute(
        call: Any, control: Any, bases: Any, rows: Any, k: int, i: int, pieces: int, flip: int, shift: int, sample: Any
    ) -> Any:
        """Row ``k`` in iteration ``i``; returns where the next one begins."""
        kind, size = rows[k + KIND], control[w.SIZE]
        piece, stages = i - rows[k + LAG], control[w.STAGE_BASES]
        nbytes = min(rows[k + MOST], rows[k + LEFT] - piece * rows[k + SHRINK])
        if piece < 0 or piece >= pieces:
            nbytes = 0
        if kind != SUM:
            if nbytes > 0:
                to = place(bases, rows, k + DST, piece, flip, shift, stages)
                source = place(bases, rows, k + SRC, piece, flip, shift, stages)
                if kind == COPY:
                    if rows[k + DST] >= stages and call[w.ONE_WRITER] > 0:
                        stage(control, to, source, nbytes)
                    elif to != source:
                        copy(to, source, nbytes)
                elif kind == WIDEN:
                    widen(to, source, nbytes, sample)
                else:
                    narrow(to, source, nbytes, sample)
            return k + WORDS
        parts, targets, complete = rows[k + SRC], rows[k + SRC_AT], rows[k + SRC_STEP]
        k += WORDS
        if nbytes > 0:
            count = parts + targets
            places = words(control[w.PLACES], 2 * count)
            for j in range(count):
                at = k + j * WORDS
                places[j] = place(bases, rows, at + (SRC if j < parts else DST), piece, flip, shift, stages)
                places[count + j] = rows[at + LEFT]
            combine(
                control[w.SCRATCH], places, parts, targets, nbytes, call[w.OP], size if complete else 0, sample
            )  # fmt: skip
        return k + (parts + targets) * WORDS

    return execute

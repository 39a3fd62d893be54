"""The interpreter of messages between two ranks: one loop, which numba compiles and Python runs as it is.

It is built from the same primitives as that of programs (interpreter.py). A loop moves several messages, at most one
for each end of a ring, in turn, piece by piece: a rank that waits for what it receives sends meanwhile. It returns when
a message is complete, when no peer makes progress for ``patience`` ns, or after `_LONGEST`: it does not check for lost
peers. The bytes moved so far count; the queue resumes from there.

A message that has not begun is matched by its expected head. Another head, or none (a receive from any rank), stops
the loop: the queue reads it (messages.py).
"""

from collections.abc import Callable
from typing import Any

from unisono.runtime import message_words as w
from unisono.runtime.interpreter import Primitives
from unisono.runtime.past_caches import staging_copy
from unisono.transport.ring import UNIT

__all__ = ["message_loops"]

_UNIT, _WORDS, _CONTROL = UNIT, w.JOB_WORDS, w.CONTROL_WORDS
_PIECE = 128 * 1024  # bytes moved between two notifications of the peer
_LONGEST = 50_000_000  # ns
_NEXT = 20_000  # ns that a loop waits behind a piece, at least
_SPINS = 8  # polls between two looks at the clock


def message_loops(p: Primitives) -> dict[str, Callable[..., int]]:
    """The loops, by name, on addresses and numbers; ``control_at`` is where a control block (message_words.py) lies."""
    words, sleep, move, add, place = p.words, p.sleep, _moving(p), _adding(p), _placing(p)

    @p.inner
    def single(control: Any, sends: int, peer: int, head: int, data: int, nbytes: int, patience: int) -> Any:
        """Moves one message that has not begun; returns its job."""
        job = words(control[w.JOB], _WORDS)
        job[w.SENDS], job[w.PEER], job[w.HEAD], job[w.DATA] = sends, peer, head, data
        job[w.NBYTES], job[w.MOVED], job[w.BEGUN] = nbytes, 0, 0
        move(control, job, 1, patience)
        return job

    def progress(control_at: int, jobs_at: int, count: int, patience: int) -> int:
        """Moves the ``count`` jobs at ``jobs_at``, none of them complete, until one is, or has met `OTHER`."""
        move(words(control_at, _CONTROL), words(jobs_at, count * _WORDS), count, patience)
        return 0

    def send(control_at: int, peer: int, head_at: int, source: int, nbytes: int, patience: int) -> Any:
        """Puts a message of ``nbytes`` at ``source``, whose head is at ``head_at``, into the ring to ``peer``.

        Returns how many bytes of the payload are in the ring, or `NOTHING_MOVED`.
        """
        control = words(control_at, _CONTROL)
        posted = place(control, control[w.RANK], peer) + 8
        add(posted, 1)
        job = single(control, 1, peer, head_at, source, nbytes, patience)
        if job[w.BEGUN] == 0:
            add(posted, -1)
            return w.NOTHING_MOVED
        return job[w.MOVED]

    def recv(control_at: int, peer: int, head_at: int, target: int, nbytes: int, patience: int) -> Any:
        """Takes the next message from ``peer``, if its head is the one at ``head_at``, to ``target``.

        Returns how many bytes of the payload have been taken, or `NOTHING_MOVED`, or `OTHER`. A receive that is not
        complete stays counted as posted.
        """
        control = words(control_at, _CONTROL)
        wanted = place(control, peer, control[w.RANK]) + 64 + 16
        add(wanted, 1)
        job = single(control, 0, peer, head_at, target, nbytes, patience)
        begun, moved = job[w.BEGUN], job[w.MOVED]
        if begun != 1 or moved == nbytes:
            add(wanted, -1)
        return moved if begun == 1 else w.NOTHING_MOVED if begun == 0 else w.OTHER

    def sleep_on_bell(control_at: int, seen: int, nanoseconds: int) -> int:
        """Sleeps, for less than a second, until this rank's bell rings, unless its count differs from ``seen``."""
        control = words(control_at, _CONTROL)
        sleep(control[w.BELLS] + 64 * control[w.RANK], seen, nanoseconds)
        return 0

    return {"send": send, "recv": recv, "sleep_on_bell": sleep_on_bell, "progress": progress}


def _adding(p: Primitives) -> Any:
    load, store = p.load_acquire64, p.store

    @p.inner
    def add(address: int, value: int) -> Any:
        """Adds to a word that this rank alone writes."""
        total = load(address) + value
        store(address, total)
        return total

    return add


def _placing(p: Primitives) -> Any:
    @p.inner
    def place(control: Any, source: int, target: int) -> Any:
        """The address of the counts of a ring."""
        return control[w.CONTROLS] + (source * control[w.SIZE] + target) * control[w.RING_CONTROL]

    return place


def _pushing(p: Primitives) -> Any:
    load, copy, publish, ring, place = p.load_acquire64, p.copy, p.store_release64, p.ring, _placing(p)
    stage = staging_copy(p, w.PAST_CACHES)

    @p.inner
    def push(control: Any, jobs: Any, k: int) -> bool:
        """Puts a piece of the message of job ``k`` into its ring, behind its head; whether anything could go."""
        capacity, rank, peer = control[w.CAPACITY], control[w.RANK], jobs[k + w.PEER]
        counts = place(control, rank, peer)
        data = control[w.RINGS] + (rank * control[w.SIZE] + peer) * capacity
        before = load(counts)
        room, written = capacity + load(counts + 64) - before, before
        if jobs[k + w.BEGUN] == 0:
            if room < _UNIT:
                return False
            copy(data + written % capacity, jobs[k + w.HEAD], _UNIT)
            jobs[k + w.BEGUN] = 1
            room -= _UNIT
            written += _UNIT
        at, left = written % capacity, jobs[k + w.NBYTES] - jobs[k + w.MOVED]
        part = max(0, min(left, room, capacity - at, _PIECE))
        stage(control, data + at, jobs[k + w.DATA] + jobs[k + w.MOVED], part)
        jobs[k + w.MOVED] += part
        written += part if part < left else -(-part // _UNIT) * _UNIT
        if written == before:
            return False
        publish(counts, written)
        ring(control[w.BELLS] + 64 * peer)
        return True

    return push


def _taking(p: Primitives) -> Any:
    load, copy, equal, publish, ring = p.load_acquire64, p.copy, p.equal, p.store_release64, p.ring
    add, place = _adding(p), _placing(p)

    @p.inner
    def take(control: Any, jobs: Any, k: int) -> bool:
        """Takes a piece of a message, behind its head, out of its ring; whether there was anything, `OTHER` included.

        A message without a place (``DATA`` 0) is dropped.
        """
        capacity, rank, peer = control[w.CAPACITY], control[w.RANK], jobs[k + w.PEER]
        counts = place(control, peer, rank)
        data = control[w.RINGS] + (peer * control[w.SIZE] + rank) * capacity
        before = load(counts + 64)
        there, taken = load(counts) - before, before
        if jobs[k + w.BEGUN] == 0:
            if there < _UNIT:
                return False
            if jobs[k + w.HEAD] == 0 or not equal(data + taken % capacity, jobs[k + w.HEAD], _UNIT):
                jobs[k + w.BEGUN] = w.OTHER
                return True
            add(counts + 64 + 8, 1)
            jobs[k + w.BEGUN] = 1
            there -= _UNIT
            taken += _UNIT
        at, left = taken % capacity, jobs[k + w.NBYTES] - jobs[k + w.MOVED]
        part = max(0, min(left, there, capacity - at, _PIECE))
        if jobs[k + w.DATA] != 0:
            copy(jobs[k + w.DATA] + jobs[k + w.MOVED], data + at, part)
        jobs[k + w.MOVED] += part
        taken += part if part < left else -(-part // _UNIT) * _UNIT
        if taken == before:
            return False
        publish(counts + 64, taken)
        ring(control[w.BELLS] + 64 * peer)
        return True

    return take


def _moving(p: Primitives) -> Any:
    load, now, relax, pause, slowness = p.load_acquire32, p.now, p.relax, p.pause, p.slowness
    push, take = _pushing(p), _taking(p)

    @p.inner
    def move(control: Any, jobs: Any, count: int, patience: int) -> None:
        """Moves all jobs, a piece of each in turn, until one needs the queue or none makes progress.

        Without patience it returns at once if there is nothing to move; behind a piece it waits for the next one.
        """
        bell, until, limit, spins = control[w.BELLS] + 64 * control[w.RANK], now() + _LONGEST, 0, 0
        most = control[w.SPINS] // slowness
        while True:
            control[w.BELL_SEEN] = load(bell)
            moved = ended = False
            for k in range(0, count * _WORDS, _WORDS):
                if push(control, jobs, k) if jobs[k + w.SENDS] else take(control, jobs, k):
                    moved = True
                begun = jobs[k + w.BEGUN]
                if begun == w.OTHER or (begun == 1 and jobs[k + w.MOVED] == jobs[k + w.NBYTES]):
                    ended = True
            if ended or (moved and now() > until):
                control[w.BELL_SEEN] -= 1  # there may be more to do at once
                return
            if moved:
                spins, limit, patience = 0, 0, max(patience, _NEXT)
                continue
            if limit == 0:
                limit = now() + patience
            if (spins >= most or spins % _SPINS == 0) and now() >= limit:
                return
            spins += 1
            if spins < most:
                relax()
            else:
                pause(bell, control[w.BELL_SEEN], limit, control[w.OVERSUBSCRIBED])

    return move

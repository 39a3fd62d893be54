"""Messages of which a part has come: their receive is given up, the group is left, others wait meanwhile."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hangs.job import Job, attempt
from unisono.runtime.messages import MessageQueue

LARGE = 3_000_000  # elements: several times what a ring holds


class Watchdog(Exception):
    """What a signal handler of the user's raises."""


def _queue() -> MessageQueue:
    group: Any = dist.group.WORLD
    found: MessageQueue = group._group.messages
    return found


def _hold_back(queue: MessageQueue, ready: Callable[[], bool]) -> None:
    """Lets none of this rank's messages under way move until ``ready``, as if its core were taken away."""
    progress_all = queue._control.progress_all

    def held(jobs: Any, patience: int) -> Any:
        if ready():
            return progress_all(jobs, patience)
        time.sleep(0.01)
        return jobs, queue._control.bell_seen

    queue._control.progress_all = held  # type: ignore[method-assign]


def interrupted(rank: int, world_size: int) -> list[Any]:
    """Rank 0's wait ends by an exception as half of a message has come; then it receives it into other memory."""
    queue, store = _queue(), dist.distributed_c10d._get_default_store()
    sent = torch.arange(float(LARGE))
    dist.barrier()
    if rank == 1:
        _hold_back(queue, lambda: store.check(["interrupted"]))
        work: Any = dist.isend(sent, 0)
        store.set("sent", "")
        return [attempt(work.wait).text, attempt(dist.barrier).text]
    x, y, sleep = torch.zeros(LARGE), torch.zeros(LARGE), queue._sleep
    store.wait(["sent"])  # what a ring holds, not more
    work = dist.irecv(x, 1)

    def interrupt(seconds: float) -> None:
        if (arriving := queue._in[1].current) is not None and arriving.moved:
            queue._sleep = sleep  # type: ignore[method-assign]
            raise Watchdog("too late")
        sleep(seconds)

    queue._sleep = interrupt  # type: ignore[method-assign]
    first = attempt(work.wait).text
    x.zero_()
    store.set("interrupted", "")
    again = attempt(lambda: dist.recv(y, 1)).text
    return [first, again, torch.equal(y, sent), x.any().item(), attempt(dist.barrier).text]


def test_a_message_whose_receive_is_given_up_half_way_goes_whole_to_the_next_one() -> None:
    with Job(interrupted, 2) as job:
        assert job.results(20) == [["too late", "1", True, False, "None"], ["True", "None"]]


def broken_off(rank: int, world_size: int) -> list[Any]:
    """Rank 0 is interrupted in the midst of a step, with bytes in its ring that are no text; it leaves the group."""
    queue, store = _queue(), dist.distributed_c10d._get_default_store()
    x = torch.full((4 * LARGE,), 0xFF, dtype=torch.uint8)
    dist.barrier()
    if rank == 1:
        _hold_back(queue, lambda: store.check(["begun"]))
        store.wait(["posted"])
        work: Any = dist.isend(x, 0)
        store.set("sent", "")
        return [attempt(work.wait).kind]
    _hold_back(queue, lambda: store.check(["sent"]))
    work, ring, progress_all = dist.irecv(x, 1), queue._in[1].ring, queue._control.progress_all

    def interrupt(jobs: Any, patience: int) -> Any:
        done = progress_all(jobs, patience)
        if any(job[-2] for job in done[0]):
            store.set("begun", "")
            end = time.monotonic() + 5
            while ring.there() < 64 and time.monotonic() < end:
                time.sleep(0.001)
            raise Watchdog("too late")
        return done

    queue._control.progress_all = interrupt  # type: ignore[method-assign]
    store.set("posted", "")
    return [attempt(work.wait).text, attempt(dist.destroy_process_group).text]


def test_a_group_is_left_after_a_step_that_was_broken_off_in_the_midst_of_a_message() -> None:
    with Job(broken_off, 2) as job:
        assert job.results(20) == [["too late", "None"], ["PeerLostError"]]


def flows(rank: int, world_size: int) -> list[Any]:
    """Rank 0 receives a message that came before its receive and is still on its way; its sender waits for rank 0."""
    queue, store = _queue(), dist.distributed_c10d._get_default_store()
    sent = torch.arange(float(LARGE))
    dist.barrier()
    if rank == 1:
        until = time.monotonic() + 1.5
        _hold_back(queue, lambda: time.monotonic() > until)
        work: Any = dist.isend(sent, 0, tag=1)
        store.set("sent", "")
        faults = [attempt(dist.barrier), attempt(work.wait), attempt(lambda: dist.send(sent[:1], 0, tag=2))]
        return [fault.text for fault in faults]
    x, last = torch.zeros(LARGE), torch.zeros(1)
    _hold_back(queue, lambda: store.check(["sent"]))
    other: Any = dist.irecv(last, 1, tag=2)
    store.wait(["sent"])
    end = time.monotonic() + 1
    while queue._in[1].current is None and time.monotonic() < end:
        other.is_completed()
    faults = [attempt(lambda: dist.recv(x, 1, tag=1)), attempt(dist.barrier), attempt(other.wait)]
    return [*(fault.text for fault in faults), torch.equal(x, sent)]


def test_a_message_that_still_arrives_is_no_deadlock() -> None:
    with Job(flows, 2) as job:
        assert job.results(20) == [["1", "None", "True", True], ["None", "True", "None"]]

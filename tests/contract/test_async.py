"""Calls in flight: many at once, waited for in any order, overtaken by others, forgotten; errors reach wait."""

import inspect
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import ranks
from unisono.errors import MismatchError


def many_in_flight(rank: int, world_size: int) -> list[float]:
    """Issue 40 calls of several kinds, then wait for them in an order that differs from rank to rank."""
    works, checks = [], []
    for i in range(40):
        x = torch.full((1 + 1000 * (i % 5),), float(rank + i))
        if i % 4 == 3:
            works.append(dist.broadcast(x, i % world_size, async_op=True))
            checks.append((x, float(i % world_size + i)))
        else:
            works.append(dist.all_reduce(x, async_op=True))
            checks.append((x, float(sum(r + i for r in range(world_size)))))
    order = list(range(40)) if rank % 2 else list(reversed(range(40)))
    for i in order:
        works[i].wait()
        assert checks[i][0].eq(checks[i][1]).all(), f"call {i} was not done when wait returned"
    return [float(work.is_completed()) for work in works]


def queued_behind_a_late_rank(rank: int, world_size: int, path: str) -> tuple[list[float], int]:
    """The last rank comes late, so that the others' calls wait for their turn; then all are carried, in loops or not.

    One of them is wrong: its own wait alone raises, and names the line that issued it.
    """
    os.environ["UNISONO_FUSED"] = "now" if rank % 2 else "0"
    dist.init_process_group("unisono", f"file://{path}", rank=rank, world_size=world_size)
    tensors = [torch.full((1 + 997 * i,), float(rank + i)) for i in range(30)]
    wrong = torch.ones(4 + rank)
    if rank == world_size - 1:
        time.sleep(0.2)
    works = [dist.all_reduce(x, async_op=True) for x in tensors[:15]]
    issued = inspect.currentframe().f_lineno + 1
    bad = dist.all_reduce(wrong, async_op=True)
    works += [dist.broadcast(x, i % world_size, async_op=True) for i, x in enumerate(tensors[15:])]
    for work in works:
        work.wait()
    with pytest.raises(MismatchError, match=rf"test_async\.py:{issued} in queued_behind"):
        bad.wait()
    calls = dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()
    dist.destroy_process_group()
    assert all(x.eq(x[0]).all() for x in tensors)
    return [x[0].item() for x in tensors], calls


def synchronous_overtakes(rank: int, world_size: int) -> tuple[float, float]:
    """Issue, make a synchronous call, and only then wait."""
    x, y = torch.full((50_000,), 1.0), torch.full((3,), 2.0)
    work = dist.all_reduce(x, async_op=True)
    dist.all_reduce(y)
    work.wait()
    return x.sum().item() / 50_000, y[0].item()


def nobody_waits(rank: int, world_size: int) -> float:
    """Forget the work at once: it must go on all the same, and hold its tensors."""
    x = torch.full((1000,), 1.0)
    dist.all_reduce(x, async_op=True)
    dist.barrier()
    return x.sum().item() / 1000


def waits_for_a_late_rank(rank: int, world_size: int) -> tuple[bool, bool]:
    """The last rank comes late: issuing does not block, is_completed says so, and later, without wait, the opposite."""
    x = torch.ones(10)
    if rank == world_size - 1:
        time.sleep(0.5)
    start = time.monotonic()
    work = dist.all_reduce(x, async_op=True)
    issued = time.monotonic() - start
    early = work.is_completed()
    deadline = time.monotonic() + 10
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert work.is_completed(), "never completed without wait"
    assert x.eq(world_size).all(), "completed without its result"
    return issued < 0.25, early


def goes_on_while_this_rank_computes(rank: int, world_size: int) -> float:
    """Rank 0 issues and sleeps without waiting: the others must not have to wait for its wait."""
    x = torch.ones(10)
    work = dist.all_reduce(x, async_op=True)
    start = time.monotonic()
    if rank == 0:
        time.sleep(1.5)
    work.wait()
    return time.monotonic() - start


def forgotten_after_many_that_were_not(rank: int, world_size: int) -> float:
    """The worker has stayed up for calls that did not need it, or has just gone to sleep: it still sees the next."""
    longest = 0.0
    for pause in (0.0, 0.0005, 0.001, 0.002, 0.003, 0.005):
        x = torch.ones(10)
        for _ in range(20):
            dist.all_reduce(x, dist.ReduceOp.MAX, async_op=True).wait()
        time.sleep(pause)
        start = time.monotonic()
        work = dist.all_reduce(x, async_op=True)
        if rank == 0:
            time.sleep(0.3)
        work.wait()
        assert x.eq(world_size).all()
        longest = max(longest, time.monotonic() - start)
    return longest


def futures_chain(rank: int, world_size: int) -> list[float]:
    """The future holds the list of tensors; then() sees them and may chain."""
    x = torch.ones(3)
    future = dist.all_reduce(x, async_op=True).get_future()
    doubled = future.then(lambda f: f.value()[0] * 2).then(lambda f: f.value() + 1)
    return doubled.wait().tolist()


def timeout_reaches_wait(rank: int, world_size: int) -> str:
    """The last rank is late: the others' wait gives up in the time it was given."""
    import datetime

    x = torch.ones(4)
    if rank == world_size - 1:
        time.sleep(1.5)
        return "late"
    work = dist.all_reduce(x, async_op=True)
    start = time.monotonic()
    try:
        work.wait(datetime.timedelta(seconds=0.3))
    except RuntimeError as error:
        took = time.monotonic() - start
        assert 0.2 < took < 1.4, f"gave up after {took} s"
        return type(error).__name__
    return "no error"


def mismatch_reaches_wait(rank: int, world_size: int) -> tuple[str, str]:
    """The ranks disagree about the length of the tensor: wait raises on all, and so does the future."""
    seen = []
    for way in ("wait", "future"):
        x = torch.ones(4 if rank else 5)
        try:
            work = dist.all_reduce(x, async_op=True)
            _ = work.wait() if way == "wait" else work.get_future().wait()
            seen.append("no error")
        except RuntimeError as error:
            text = f"{type(error).__name__}: {error}"  # torch's future wraps what it raises in a RuntimeError
            seen.append("MismatchError" if "MismatchError" in text else text)
    return seen[0], seen[1]


several = pytest.mark.parametrize("world_size", [2, 3, 8], indirect=True)


def test_many_in_flight(world_size: int) -> None:
    assert ranks(world_size).run(many_in_flight) == [[1.0] * 40] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_calls_that_wait_for_their_turn(world_size: int, tmp_path: Path) -> None:
    summed = [float(sum(rank + i for rank in range(world_size))) for i in range(15)]
    sent = [float(i % world_size + 15 + i) for i in range(15)]
    found = ranks(world_size, group=False).run(queued_behind_a_late_rank, str(tmp_path / "meeting"))
    assert found == [(summed + sent, 31)] * world_size


def test_a_synchronous_call_may_overtake(world_size: int) -> None:
    assert ranks(world_size).run(synchronous_overtakes) == [(world_size, 2.0 * world_size)] * world_size


def test_a_forgotten_call_goes_on(world_size: int) -> None:
    assert ranks(world_size).run(nobody_waits) == [world_size] * world_size


def test_futures_chain(world_size: int) -> None:
    assert ranks(world_size).run(futures_chain) == [[2.0 * world_size + 1] * 3] * world_size


@several
def test_is_completed_follows_a_late_rank(world_size: int) -> None:
    *early, late = ranks(world_size).run(waits_for_a_late_rank)
    assert early == [(True, False)] * (world_size - 1)
    assert late[0]


@several
def test_progress_in_the_background(world_size: int) -> None:
    sleeper, *others = ranks(world_size).run(goes_on_while_this_rank_computes)
    assert sleeper >= 1.5
    assert max(others) < 1.0, "the call made no progress while one of its ranks computed"


def test_the_worker_stays_awake_and_falls_asleep() -> None:
    sleeper, *others = ranks(2).run(forgotten_after_many_that_were_not)
    assert sleeper >= 0.3
    assert max(others) < 0.25, "a call made no progress while one of its ranks computed"


@pytest.mark.parametrize("world_size", [2, 3], indirect=True)
def test_a_timeout_reaches_wait(world_size: int) -> None:
    outcomes = ranks(world_size, group_timeout=20).run(timeout_reaches_wait)
    assert outcomes == ["CollectiveTimeout"] * (world_size - 1) + ["late"]


@several
def test_a_mismatch_reaches_wait_and_the_future(world_size: int) -> None:
    assert ranks(world_size).run(mismatch_reaches_wait) == [("MismatchError", "MismatchError")] * world_size

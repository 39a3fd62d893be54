"""Ranks that wait for each other in a cycle: all of them raise within two seconds, with the chain and every line."""

import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hangs.job import Fault, Job, attempt

LARGE, SMALL = 3_000_000, 4


def send_send(rank: int, groups: list[Any]) -> None:
    dist.send(torch.zeros(LARGE), 1 - rank)


def recv_recv(rank: int, groups: list[Any]) -> None:
    dist.recv(torch.zeros(SMALL), 1 - rank)


def recv_ring(rank: int, groups: list[Any]) -> None:
    dist.recv(torch.zeros(SMALL), (rank + 1) % 3)


def send_ring(rank: int, groups: list[Any]) -> None:
    dist.send(torch.zeros(LARGE), (rank + 1) % 3)


def mixed_tags(rank: int, groups: list[Any]) -> None:
    """A message is there, but with another tag than the one that is waited for."""
    dist.send(torch.zeros(SMALL), 1 - rank, tag=1)
    dist.recv(torch.zeros(SMALL), 1 - rank, tag=2)


def crossed_groups(rank: int, groups: list[Any]) -> None:
    for k in (0, 1) if rank == 0 else (1, 0):
        dist.all_reduce(torch.zeros(SMALL), group=groups[k])


def against_collective(rank: int, groups: list[Any]) -> None:
    dist.recv(torch.zeros(SMALL), 1) if rank == 0 else dist.barrier()


def collective_against_send(rank: int, groups: list[Any]) -> None:
    dist.send(torch.zeros(LARGE), 1) if rank == 0 else dist.all_reduce(torch.zeros(SMALL))


def three_groups(rank: int, groups: list[Any]) -> None:
    """Groups [0, 1], [1, 2], [2, 0]: every rank is at the one it shares with the next."""
    dist.all_reduce(torch.zeros(SMALL), group=groups[rank])
    dist.all_reduce(torch.zeros(SMALL), group=groups[rank - 1])


def waits_in_work(rank: int, groups: list[Any]) -> None:
    """Receives posted on both sides, the sends never: in wait, not in the call."""
    work = dist.irecv(torch.zeros(SMALL), 1 - rank)
    assert work is not None
    work.wait()


def batch(rank: int, groups: list[Any]) -> None:
    operations = [dist.P2POp(dist.irecv, torch.zeros(SMALL), 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def beside_a_feeder(rank: int, groups: list[Any]) -> None:
    """A thread feeds a queue of processes, as a DataLoader with workers has it."""
    indices: multiprocessing.Queue[int] = multiprocessing.Queue()
    indices.put(0)
    dist.recv(torch.zeros(SMALL), 1 - rank)


def beside_an_executor(rank: int, groups: list[Any]) -> None:
    """Its thread has done its work and waits for more."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()
        dist.recv(torch.zeros(SMALL), 1 - rank)


def any_of_two(rank: int, groups: list[Any]) -> None:
    """Any rank is the other one, where there are two."""
    dist.recv(torch.zeros(SMALL)) if rank == 0 else dist.barrier()


def own_message(rank: int, groups: list[Any]) -> None:
    """Nobody else could send it."""
    dist.recv(torch.zeros(SMALL), rank)


PROGRAMS: dict[Callable[[int, list[Any]], None], tuple[int, list[list[int]], list[str]]] = {
    send_send: (2, [], [r"send\(float32 \[3000000\]\) to rank 1", r"send\(float32 \[3000000\]\) to rank 0"]),
    recv_recv: (2, [], [r"recv\(float32 \[4\]\) from rank 1", r"recv\(float32 \[4\]\) from rank 0"]),
    recv_ring: (3, [], ["from rank 0", "from rank 1", "from rank 2"]),
    send_ring: (3, [], ["to rank 0", "to rank 1", "to rank 2"]),
    mixed_tags: (2, [], [r"from rank 1 \(tag 2", r"from rank 0 \(tag 2"]),
    crossed_groups: (2, [[0, 1], [0, 1]], [r"call no\. 1 of group 1 \[0, 1\]", r"call no\. 1 of group 2 \[0, 1\]"]),
    against_collective: (
        2,
        [],
        [r"recv\(float32 \[4\]\) from rank 1", r"barrier\(\), call no\. 1 of the default group"],
    ),
    collective_against_send: (2, [], [r"send\(.*\) to rank 1", r"all_reduce\(float32 \[4\], SUM\)"]),
    three_groups: (3, [[0, 1], [1, 2], [2, 0]], [r"\[0, 1\]", r"\[1, 2\]", r"\[0, 2\]"]),
    waits_in_work: (2, [], ["from rank 1", "from rank 0"]),
    batch: (2, [], ["from rank 1", "from rank 0"]),
    any_of_two: (2, [], ["from any rank", r"barrier\(\)"]),
    own_message: (1, [], ["this rank waits for itself", "from rank 0"]),
    beside_a_feeder: (2, [], ["from rank 1", "from rank 0"]),
    beside_an_executor: (2, [], ["from rank 1", "from rank 0"]),
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_every_member_reads_the_chain(program: Callable[[int, list[Any]], None]) -> None:
    world_size, lists, facts = PROGRAMS[program]
    with Job(one, world_size, program.__name__, lists) as job:
        faults = job.results(20)
        pids = [job.pid(rank) for rank in range(world_size)]
    code = program.__code__
    for fault in faults:
        fault.says("DeadlockError", "which waits for", *facts, *(rf"rank {r} \(pid {p}\)" for r, p in enumerate(pids)))
        assert fault.seconds < 2.0
        places = [line for line in fault.text.splitlines() if "test_deadlock.py:" in line]
        assert len(places) == world_size + 1, fault.text  # the chain ends where it began
        assert all(f" in {code.co_name}" in place for place in places)
    assert len({fault.text for fault in faults}) == 1


def one(rank: int, world_size: int, name: str, lists: list[list[int]]) -> Fault:
    program = next(p for p in PROGRAMS if p.__name__ == name)
    groups = [dist.new_group(ranks) for ranks in lists]
    time.sleep(0.05 * rank)
    return attempt(lambda: program(rank, groups))


def goes_on(rank: int, world_size: int) -> list[str]:
    """Who has read of the deadlock makes the call that the other waits for; how the calls of the two groups ended."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    kinds = ["", ""]
    for k in (0, 1) if rank == 0 else (1, 0):
        kinds[k] = attempt(lambda k=k: dist.all_reduce(torch.zeros(SMALL), group=groups[k])).kind
    return kinds


def test_a_call_that_a_deadlock_has_ended_succeeds_on_no_rank() -> None:
    with Job(goes_on, 2) as job:
        first, second = job.results(20)
    assert "DeadlockError" in first + second
    for here, there in zip(first, second, strict=True):
        assert bool(here) == bool(there), (first, second)


def bystander(rank: int, world_size: int) -> Fault:
    """Ranks 0 and 1 are in a deadlock; rank 2 waits for one of them and reads of it."""
    if rank < 2:
        fault = attempt(lambda: dist.recv(torch.zeros(1), 1 - rank))
        raise RuntimeError(fault.text)
    return attempt(dist.barrier)


def test_a_bystander_hears_what_the_others_died_of() -> None:
    with Job(bystander, 3) as job:
        fault = job.results(20)[2]
    fault.says("PeerLostError", "wait for each other")


def slow_but_sound(rank: int, world_size: int) -> list[str]:
    """What looks like a cycle for a while and is none: a third rank, a thread or a callback will end it."""
    faults = []
    x = torch.zeros(1)
    # 0 and 1 receive from each other's direction, but rank 2 serves both after a second.
    if rank < 2:
        faults.append(attempt(lambda: dist.recv(x, 2)))
    else:
        time.sleep(1.0)
        dist.send(x, 0)
        dist.send(x, 1)
    # A thread sends what the main threads of both wait for.
    if rank < 2:
        thread = threading.Timer(1.0, lambda: dist.send(torch.ones(1), 1 - rank))
        thread.name = "unisono sender"  # as the library's own threads are named
        thread.start()
        faults.append(attempt(lambda: dist.recv(x, 1 - rank)))
        thread.join()
    # A large send to a rank that computes first.
    if rank == 0:
        faults.append(attempt(lambda: dist.send(torch.zeros(LARGE), 1)))
        faults.append(attempt(lambda: dist.recv(torch.zeros(LARGE), 1)))
    elif rank == 1:
        time.sleep(1.0)
        large = torch.zeros(LARGE)
        faults.append(attempt(lambda: dist.recv(large, 0)))
        faults.append(attempt(lambda: dist.send(large, 0)))
    faults.append(attempt(dist.barrier))
    return [f.text for f in faults if f.kind]


def test_slow_is_not_deadlocked() -> None:
    with Job(slow_but_sound, 3) as job:
        assert job.results(20) == [[], [], []]


def slow_callbacks(rank: int, world_size: int) -> Fault | None:
    """Ranks 0 and 1 wait for what their own workers will send, once rank 2 has come and callbacks have run a while."""
    dist.barrier()
    if rank == 2:
        time.sleep(0.3)
        dist.all_reduce(torch.zeros(SMALL))
        return None
    work = dist.all_reduce(torch.zeros(SMALL), async_op=True)
    assert work is not None

    def send(future: torch.futures.Future[Any]) -> None:
        time.sleep(0.8)
        dist.send(torch.ones(1), 1 - rank)

    work.get_future().then(send)
    return attempt(lambda: dist.recv(torch.zeros(1), 1 - rank))


def test_callbacks_that_run_are_not_deadlocked() -> None:
    with Job(slow_callbacks, 3) as job:
        first, second, _ = job.results(20)
    assert (first.kind, second.kind) == ("", ""), first.text

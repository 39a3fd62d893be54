"""kill -9 at a random moment, again and again: the survivors always know, within a second, whom they have lost."""

import fcntl
import gc
import os
import pickle
import random
import select
import signal
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hangs.job import DUMP_STACKS, Fault, Job, attempt, end_with_parent
from unisono.torch_names import all_gather_single

WORLD_SIZE = 3


def walk(rank: int, seed: int) -> None:
    """Random calls for ever, the same on all ranks, of sizes that take microseconds to milliseconds."""
    rng = random.Random(seed)
    pair, works = dist.new_group([0, 1]), []
    while True:
        kind, size = rng.randrange(8), rng.choice((1, 100, 10_000, 400_000))
        asynchronous = rng.random() < 0.3
        x = torch.ones(size * WORLD_SIZE)
        a, b = rng.sample(range(WORLD_SIZE), 2)
        if kind == 0:
            works.append(dist.all_reduce(x, async_op=asynchronous))
        elif kind == 1:
            works.append(dist.broadcast(x, a, async_op=asynchronous))
        elif kind == 2:
            works.append(dist.all_to_all_single(torch.empty_like(x), x, async_op=asynchronous))
        elif kind == 3:
            works.append(all_gather_single(x, x[:size].clone(), async_op=asynchronous))
        elif kind == 4 and rank in (a, b):
            (dist.send(x, b) if rank == a else dist.recv(x, a))
        elif kind == 5 and rank in (0, 1):
            dist.all_reduce(x, group=pair)
        elif kind == 6:
            dist.barrier()
        elif kind == 7:
            for work in works:
                if work is not None:
                    work.wait()
            works.clear()


class FolderStore(dist.Store):
    """A store of one file per key, which no death of a process can leave half written.

    torch's FileStore reads for ever on half a record. Its TCPStore, over the loopback of a virtual machine, now and
    then left requests unanswered for 2 to 5 s while its server slept: ranks that make a group are late then.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def place(self, key: str) -> str:
        return f"{self.folder}/{key.replace('/', '|')}"

    def set(self, key: str, value: str | bytes) -> None:
        new = f"{self.folder}/new-{os.getpid()}-{threading.get_ident()}"
        with open(new, "wb") as file:
            file.write(value if isinstance(value, bytes) else value.encode())
        os.replace(new, self.place(key))

    def get(self, key: str) -> bytes:
        while not self.check([key]):
            time.sleep(0.001)
        with open(self.place(key), "rb") as file:
            return file.read()

    def add(self, key: str, value: int) -> int:
        with open(f"{self.folder}/lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            total = value + (int(self.get(key)) if self.check([key]) else 0)
            self.set(key, str(total))
        return total

    def check(self, keys: list[str]) -> bool:
        return all(os.path.exists(self.place(key)) for key in keys)


def walker(rank: int, folder: str, orders: int, say: int) -> None:
    """One rank, forked: walks once per order, a line of prefix and seed; tells that it is there, then how it ended."""
    end_with_parent()
    inner = FolderStore(folder)  # torch keeps its C++ half alone
    try:
        while order := os.read(orders, 100):  # one line: the next is not written before this one is answered
            prefix, seed = order.decode().split()
            store = dist.PrefixStore(prefix, inner)
            dist.init_process_group("unisono", store=store, rank=rank, world_size=WORLD_SIZE)
            dist.barrier()
            os.write(say, b"ready\n")
            fault = attempt(lambda seed=int(seed): walk(rank, seed))
            fault_after = attempt(dist.barrier)  # the loss surfaces here if it has not concerned the walk itself
            os.write(say, pickle.dumps((fault, fault_after)))
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


class Walker:
    """A rank's process, as its launcher sees it."""

    def __init__(self, rank: int, folder: str) -> None:
        (orders, self.orders), (self.hear, say) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            walker(rank, folder, orders, say)
        os.close(orders)
        os.close(say)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.orders)
        os.close(self.hear)


def launch(rank: int, world_size: int, folder: str, rounds: int) -> list[str]:
    """Rounds of ranks that walk, are robbed of one, and heard; returns what was wrong. The one killed is replaced."""

    gc.freeze()
    rng, wrong = random.Random(rank), []
    walkers = [Walker(r, folder) for r in range(WORLD_SIZE)]
    for k in range(rounds):
        seed, victim, delay = rng.randrange(10**9), rng.randrange(WORLD_SIZE), rng.random() ** 2 * 0.04
        pids = [w.pid for w in walkers]
        for w in walkers:
            os.write(w.orders, f"{rank}/{k} {seed}\n".encode())
        ready = [heard(w.hear, pids) == b"ready\n" for w in walkers]
        time.sleep(delay)
        killed = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        for r, w in enumerate(walkers):
            told = b"" if r == victim else heard(w.hear, pids)
            if not ready[r] or (not told and r != victim):
                wrong.append(f"round {k} (seed {seed}): rank {r} hangs (pids {pids}, {victim} was killed)")
            elif r != victim:
                wrong += [f"round {k}, rank {r}: {w}" for w in judged(pickle.loads(told), killed, victim, pids[victim])]
        if len(wrong) > 5:
            break
        walkers[victim].end()
        walkers[victim] = Walker(victim, folder)
    for w in walkers:
        w.end()
    return wrong


def heard(pipe: int, pids: list[int]) -> bytes:
    """What a rank says within ten seconds; nothing if it is silent, or has ended: then all show their stacks."""
    if select.select([pipe], [], [], 10.0)[0] and (said := os.read(pipe, 1 << 16)):
        return said
    for pid in pids:
        os.kill(pid, DUMP_STACKS)
    time.sleep(0.5)
    return b""


def judged(faults: tuple[Fault, Fault], killed: float, victim: int, pid: int) -> list[str]:
    """What is wrong with a survivor's errors."""
    named = f"rank {victim} (pid {pid} on {os.uname().nodename}) is dead: killed by SIGKILL"
    wrong = [f"{f.kind}: {f.text}" for f in faults if f.kind != "PeerLostError" or named not in f.text]
    late = faults[0].at - killed
    return wrong + [f"{late:.2f} s late"] * (late > 1.0)


@pytest.mark.timeout(200)  # a tenth of a second a round on a calm machine of two cores
@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_rounds_of_two_launchers_at_the_same_time(tmp_path: Path, rounds: int) -> None:
    with Job(launch, 2, str(tmp_path), rounds, group=False) as job:
        results = job.results(180)
        errors = job.errors(0) + job.errors(1)
    assert results == [[], []], errors

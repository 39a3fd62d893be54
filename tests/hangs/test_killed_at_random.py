"""kill -9 at a random moment, two hundred times: the survivors always know, within a second, whom they have lost."""

import gc
import os
import pickle
import random
import select
import signal
import time
import traceback

import pytest
import torch
import torch.distributed as dist

from hangs.job import DUMP_STACKS, Fault, Job, attempt, end_with_parent

ROUNDS = 100  # for each of two launchers that work at the same time
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
            works.append(dist.all_gather_single(x, x[:size].clone(), async_op=asynchronous))
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


def survivor(rank: int, port: int, prefix: str, seed: int, say: int) -> None:
    """One rank, forked: reports that it is ready, then how its walk ended. Never returns."""
    end_with_parent()
    try:
        # Not a file: a rank killed while it writes one leaves half a record, on which torch's FileStore reads for ever.
        store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False))
        dist.init_process_group("unisono", store=store, rank=rank, world_size=WORLD_SIZE)
        dist.barrier()
        os.write(say, b"ready\n")
        fault = attempt(lambda: walk(rank, seed))
        fault_after = attempt(dist.barrier)  # the loss surfaces here if it has not concerned the walk itself
        os.write(say, pickle.dumps((fault, fault_after)))
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def launch(rank: int, world_size: int, port: int, rounds: int) -> list[str]:
    """Rounds of ranks that are forked, left to walk, robbed of one, and heard; returns what was wrong."""
    import unisono.backend.process_group  # once, instead of in every rank
    import unisono.run.scheduled  # noqa: F401

    gc.freeze()
    rng, wrong = random.Random(rank), []
    for k in range(rounds):
        seed, victim, delay = rng.randrange(10**9), rng.randrange(WORLD_SIZE), rng.random() ** 2 * 0.04
        pids, pipes = [], []
        for r in range(WORLD_SIZE):
            hear, say = os.pipe()
            pids.append(os.fork())
            if pids[-1] == 0:
                survivor(r, port, f"{rank}/{k}", seed, say)
            os.close(say)
            pipes.append(hear)
        ready = [heard(pipe, pids) and os.read(pipe, 6) == b"ready\n" for pipe in pipes]
        time.sleep(delay)
        killed = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        told = [heard(pipe, pids) for pipe in pipes]
        for r, pipe in enumerate(pipes):
            with open(pipe, "rb") as file:
                data = file.read()
            if not ready[r] or not told[r]:
                wrong.append(f"round {k} (seed {seed}): rank {r} hangs (pids {pids}, {victim} was killed)")
            elif r != victim:
                faults = pickle.loads(data) if data else ()
                wrong += [f"round {k}, rank {r}: {w}" for w in judged(faults, killed, victim, pids[victim])]
        for pid in pids:
            os.waitpid(pid, 0)
        if len(wrong) > 5:
            break
    return wrong


def heard(pipe: int, pids: list[int]) -> bool:
    """Whether a rank says something, or ends, within ten seconds; if not, all show their stacks and are killed."""
    if select.select([pipe], [], [], 10.0)[0]:
        return True
    for pid in pids:
        os.kill(pid, DUMP_STACKS)
    time.sleep(0.5)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return False


def judged(faults: tuple[Fault, ...], killed: float, victim: int, pid: int) -> list[str]:
    """What is wrong with a survivor's errors."""
    named = f"rank {victim} (pid {pid} on {os.uname().nodename}) is dead: killed by SIGKILL"
    wrong = [f"{f.kind}: {f.text}" for f in faults if f.kind != "PeerLostError" or named not in f.text]
    late = [f.at - killed for f in faults[:1] if f.at - killed > 1.0]
    return wrong + [f"{late} s late"] * bool(late) + ["no word"] * (not faults)


@pytest.mark.timeout(200)  # 20 s on a calm machine of two cores
def test_two_hundred_rounds() -> None:
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # here: its threads must not be forked
    with Job(launch, 2, server.port, ROUNDS, group=False) as job:
        results = job.results(180)
        errors = job.errors(0) + job.errors(1)
    said = results[0] + results[1]
    late = [line for line in said if line.endswith("s late")]
    assert [line for line in said if line not in late] == [], errors
    assert len(late) <= ROUNDS // 50, late  # a machine that starts processes all the time may hold a core for a second

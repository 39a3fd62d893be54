"""How long until a rank that sleeps in a receive goes on: unisono, Gloo, and two processes with nothing but a futex.

python benchmarks/wake_up/wake_up.py [rounds]
"""

import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from unisono.transport.futex import Counter

PAUSE = 0.004  # s: a receiver sleeps by then
Way = tuple[Callable[[], None], Callable[[], int]]  # sends the time; sleeps until it comes, and returns it


def bare(memory: mmap.mmap) -> Way:
    """A time stamp in shared memory, and a counter on which the receiver sleeps at once."""
    view = memoryview(memory)
    stamp, words = view.cast("q"), view.cast("I")
    counter = Counter(words, 16, torch.frombuffer(memory, dtype=torch.uint8).data_ptr())

    def send() -> None:
        stamp[0] = time.monotonic_ns()
        counter.add()

    def receive() -> int:
        seen = counter.value()
        while counter.value() == seen:
            counter.sleep(seen, 1.0)
        return int(stamp[0])

    return send, receive


def library(group: dist.ProcessGroup) -> Way:
    """The time as the first of 128 integers in a message of 1 KiB."""
    told = torch.zeros(128, dtype=torch.int64)

    def send() -> None:
        told[0] = time.monotonic_ns()
        dist.send(told, 1, group)

    def receive() -> int:
        dist.recv(told, 0, group)
        return int(told[0])

    return send, receive


def work(rank: int, rounds: int, path: str, memory: mmap.mmap) -> None:
    """One rank. The ways take turns, round by round; nobody spins between two."""
    torch.set_num_threads(1)
    dist.init_process_group("unisono", f"file://{path}/meeting", rank=rank, world_size=2)
    ways = {
        "futex": bare(memory),
        "unisono": library(dist.group.WORLD),
        "gloo": library(dist.new_group(backend="gloo")),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (send, receive) in ways.items():
            dist.barrier()
            if rank == 0:
                time.sleep(PAUSE)
                send()
            else:
                sent = receive()
                found[name].append((time.monotonic_ns() - sent) / 1e3)
    if rank == 1:
        print(f"{rounds} rounds, us: lower quartile, median, upper quartile")
        for name, times in found.items():
            low, middle, high = statistics.quantiles(times, n=4)
            print(f"| {name} | {low:.0f} | {middle:.0f} | {high:.0f} |")
    dist.destroy_process_group()


def main() -> None:
    """Starts both ranks."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    with tempfile.TemporaryDirectory() as path:
        mp.start_processes(work, (rounds, path, mmap.mmap(-1, mmap.PAGESIZE)), 2, start_method="fork")


if __name__ == "__main__":
    main()

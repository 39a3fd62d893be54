"""What the guard costs per call: the same loop with it and, for this measurement only, without it.

    python benchmarks/guard/guard.py [--ranks 2 4] [--nbytes 4 65536] [--blocks 60]

"Without" takes out, on all ranks, what every call does so that mistakes have names: laying its header beside the data,
comparing the headers after the meeting, and keeping count for late ranks, `unisono ps` and the flight record. Nothing
in the library can be switched off; this program replaces the methods of its own group's lane. Blocks of calls with and
without take turns in one process; each block's time is that of the slowest rank, and the cost is the median, over
neighbouring blocks, of the difference per call. Torch's operations are measured: in the compiled loops nothing can be
taken out, and all they do together is the bound there (benchmarks/call_budget). The exit code is 1 if a cost is above
its limit of 3 µs or 5 %.
"""

import argparse
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

__all__: list[str] = []

LIMIT_US, LIMIT_SHARE = 3.0, 0.05


class Switch:
    """Takes the guard out of a group's lane of collectives, and puts it back."""

    def __init__(self) -> None:
        group: Any = dist.distributed_c10d._get_default_group()
        self.lane = group._group.collectives

    def off(self) -> None:
        """Every rank must do so after the same call."""
        lane = self.lane

        def count(*_: Any) -> None:
            lane._issued += 1

        def account() -> None:
            lane._fresh, lane._arrived = True, False
            lane.calls += 1

        lane._post = lane._check = lambda *_: None
        lane._count, lane._account = count, account

    def on(self) -> None:
        """As the class has it."""
        for name in ("_post", "_check", "_count", "_account"):
            vars(self.lane).pop(name, None)


def block(x: torch.Tensor, calls: int) -> float:
    """Microseconds per call on this rank."""
    dist.barrier()
    start = time.perf_counter_ns()
    for _ in range(calls):
        dist.all_reduce(x)
    return (time.perf_counter_ns() - start) / 1e3 / calls


def rank_main(rank: int, world_size: int, meeting: str, nbytes: int, blocks: int, results: Any) -> None:
    """Runs the blocks; rank 0 hands over the times of the slowest rank, with and without."""
    torch.set_num_threads(1)
    os.environ["UNISONO_FUSED"] = "0"
    dist.init_process_group("unisono", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    x, switch = torch.zeros(nbytes // 4), Switch()
    block(x, 200)
    calls = max(50, round(0.02e6 / block(x, 200)))
    shared = torch.tensor([calls])
    dist.broadcast(shared, 0)
    calls, times = int(shared), torch.zeros(2, blocks)
    for k in range(blocks):
        for way in (0, 1) if k % 2 else (1, 0):
            dist.barrier()
            if way:
                switch.off()
            times[way, k] = block(x, calls)
            dist.barrier()
            switch.on()
    dist.all_reduce(times, dist.ReduceOp.MAX)
    if rank == 0:
        results.put(times.tolist())
    dist.destroy_process_group()


def measure(world_size: int, nbytes: int, blocks: int) -> tuple[float, float, float]:
    """Median microseconds per call with and without, and the median of the differences."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, f"{folder}/meeting", nbytes, blocks, results)
        ranks = [context.Process(target=rank_main, args=(rank, *arguments)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()  # the few numbers fit into the pipe
        if any(process.exitcode for process in ranks):
            sys.exit("a rank failed: this program does not fit the library any more")
        guarded, bare = results.get()
    cost = statistics.median(a - b for a, b in zip(guarded, bare, strict=True))
    return statistics.median(guarded), statistics.median(bare), cost


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--nbytes", type=int, nargs="+", default=[4, 65536])
    parser.add_argument("--blocks", type=int, default=60)
    options = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print("| ranks | bytes | without, µs | with, µs | cost, µs | limit, µs | load |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    bad = 0
    for world_size in options.ranks:
        for nbytes in options.nbytes:
            guarded, bare, cost = measure(world_size, nbytes, options.blocks)
            limit = max(LIMIT_US, LIMIT_SHARE * bare)
            bad += cost > limit
            load = os.getloadavg()[0]
            row = (world_size, nbytes, f"{bare:.1f}", f"{guarded:.1f}", f"{cost:.2f}", f"{limit:.2f}", f"{load:.1f}")
            print(f"| {' | '.join(map(str, row))} |", flush=True)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())

"""What the guard costs per call: the same loop with it and, for this measurement only, without it.

    python benchmarks/guard/guard.py [--ways loops torch] [--ranks 2 4] [--nbytes 4 65536] [--blocks 60]

"Without" takes out, on all ranks, what every call does so that mistakes have names: publishing its header beside the
data, comparing the headers after the meeting, and keeping count for late ranks, `unisono ps` and the flight record.
Nothing in the library can be switched off; this program prepares the call once more as a part of another one, which has
no header and no books. Blocks of calls with and without take turns in one process; each block's time is that of the
slowest rank, and the cost is the median, over neighbouring blocks, of the difference per call. The exit code is 1 if a
cost is above its limit of 3 µs or 5 %.
"""

import argparse
import itertools
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

from unisono.backend.reduce_ops import ReduceOps
from unisono.runtime.choice import by_default
from unisono.runtime.prepared import Kind

__all__: list[str] = []

LIMIT_US, LIMIT_SHARE = 3.0, 0.05


class Switch:
    """Takes the guard out of all_reduces of ``x``, and puts it back; both ways through one more Python function."""

    def __init__(self, x: torch.Tensor, compiled: bool) -> None:
        group: Any = dist.distributed_c10d._get_default_group()
        self.queue, operations = group._group.collectives, group._group.operations
        self.found = group._group.fast_path.prepared(ReduceOps.all_reduce_kind, "SUM", x, x)
        choice = by_default("all_reduce", x.nbytes, group.size(), 0, operations.oversubscribed)
        kind = Kind(self.found.call, choice, x.dtype, (x.numel(),), guarded=False, completes=False)
        self.guarded = (self.found.address, self.found.run)
        self.kept = operations.preparer.prepare(kind)
        assert (type(self.found.run).__name__ == "builtin_function_or_method") == compiled, "not as asked for"
        self.on()

    def off(self) -> None:
        """Every rank must do so after the same call."""
        run = self.kept.run
        self.found.address = self.kept.address
        self.found.run = lambda call, control, number, *rest: run(call, control, 0, *rest)

    def on(self) -> None:
        """As the group has it."""
        self.found.address, run = self.guarded
        self.found.run = lambda call, control, number, *rest: run(call, control, number, *rest)


def block(x: torch.Tensor, calls: int) -> float:
    """Microseconds per call on this rank."""
    dist.barrier()
    start = time.perf_counter_ns()
    for _ in range(calls):
        dist.all_reduce(x)
    return (time.perf_counter_ns() - start) / 1e3 / calls


def rank_main(rank: int, world_size: int, meeting: str, nbytes: int, blocks: int, compiled: bool, results: Any) -> None:
    """Runs the blocks; rank 0 hands over the times of the slowest rank, with and without."""
    torch.set_num_threads(1)
    os.environ.update(UNISONO_FUSED="now" if compiled else "0", UNISONO_PIN="1")
    dist.init_process_group("unisono", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    x = torch.zeros(nbytes // 4)
    block(x, 200)
    switch = Switch(x, compiled)
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


def measure(compiled: bool, world_size: int, nbytes: int, blocks: int) -> tuple[float, float, float]:
    """Median microseconds per call with and without, and the median of the differences."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, f"{folder}/meeting", nbytes, blocks, compiled, results)
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
    parser.add_argument("--ways", nargs="+", default=["loops", "torch"], choices=["loops", "torch"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--nbytes", type=int, nargs="+", default=[4, 65536])
    parser.add_argument("--blocks", type=int, default=60)
    options = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    print("| way | ranks | bytes | without, µs | with, µs | cost, µs | limit, µs | load |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    bad = 0
    for way, world_size, nbytes in itertools.product(options.ways, options.ranks, options.nbytes):
        guarded, without, cost = measure(way == "loops", world_size, nbytes, options.blocks)
        limit = max(LIMIT_US, LIMIT_SHARE * without)
        bad += cost > limit
        times = (f"{number:.2f}" for number in (without, guarded, cost, limit))
        print(
            "|", " | ".join([way, str(world_size), str(nbytes), *times, f"{os.getloadavg()[0]:.1f}"]), "|", flush=True
        )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())

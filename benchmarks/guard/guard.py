"""What the guard costs per call: the same loop with it and, for this measurement only, without it.

    python benchmarks/guard/guard.py [--ways loops torch] [--ranks 2 4] [--nbytes 4 65536] [--blocks 60]

"Without" takes out, on all ranks, what every call does so that mistakes have names: laying its header beside the data,
comparing the headers after the meeting, and keeping count for late ranks, `unisono ps` and the flight record. Nothing
in the library can be switched off; this program replaces the methods of its own group's lane, and for the compiled
loops it compiles a second copy of their module in which the same things do nothing. Blocks of calls with and without
take turns in one process; each block's time is that of the slowest rank, and the cost is the median, over neighbouring
blocks, of the difference per call. The exit code is 1 if a cost is above its limit of 3 µs or 5 %.
"""

import argparse
import functools
import importlib.util
import itertools
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

__all__: list[str] = []

LIMIT_US, LIMIT_SHARE = 3.0, 0.05


@functools.cache
def bare_loop() -> Any:
    """The compiled loop of float32 once more, in which headers and records do nothing; not kept on disk."""
    from numba import njit

    from unisono.run import fused, fused_entry, object_code

    spec = importlib.util.spec_from_file_location("loops_without_a_guard", fused.__file__)
    assert spec is not None
    assert spec.loader is not None
    bare: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bare)
    bare._meet = fused._meet  # the meeting itself needs the time, and is compiled with its own names
    bare.now = njit(lambda: 0)
    bare.note = njit(lambda address, value: None)
    bare.copy = njit(lambda target, source, nbytes: None)
    bare._differ = njit(lambda desk, half, header_at, stride: False)
    code = fused_entry.compiled("bare", {"run": bare.loops_of("float32")["run"]})
    return object_code.functions("bare", code)["run"]


class Switch:
    """Takes the guard out of a group's lane of collectives, and puts it back; ``bare``: the loop without, if any."""

    def __init__(self, bare: Any) -> None:
        group: Any = dist.distributed_c10d._get_default_group()
        self.lane = group._group.collectives
        self.bare = bare
        assert (self.lane.desk.address == 0) == (bare is None), "not the way that was asked for"

    def off(self) -> None:
        """Every rank must do so after the same call."""
        lane = self.lane

        def count(*_: Any) -> None:
            lane._issued += 1

        def account() -> None:
            lane._fresh, lane._arrived = True, False
            lane.calls += 1

        orders: dict[int, Any] = {}  # which each stand for one that is kept, as they are themselves

        def run(order: Any, output: Any, tensor: Any, patience: float) -> Any:
            lane._issued += 1
            if id(order) not in orders:
                orders[id(order)] = replace(order, run=self.bare)
            return lane._loop(orders[id(order)], output, tensor, patience, lane._issued)

        lane._post = lane._check = lambda *_: None
        lane._count, lane._account = count, account
        if self.bare is not None:
            lane._run = run

    def on(self) -> None:
        """As the class has it."""
        for name in ("_post", "_check", "_count", "_account", "_run"):
            vars(self.lane).pop(name, None)


def block(x: torch.Tensor, calls: int) -> float:
    """Microseconds per call on this rank."""
    dist.barrier()
    start = time.perf_counter_ns()
    for _ in range(calls):
        dist.all_reduce(x)
    return (time.perf_counter_ns() - start) / 1e3 / calls


def rank_main(rank: int, world_size: int, meeting: str, nbytes: int, blocks: int, bare: Any, results: Any) -> None:
    """Runs the blocks; rank 0 hands over the times of the slowest rank, with and without."""
    torch.set_num_threads(1)
    os.environ.update(UNISONO_FUSED="0" if bare is None else "now", UNISONO_PIN="1")
    dist.init_process_group("unisono", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    x = torch.zeros(nbytes // 4)
    block(x, 200)
    switch = Switch(bare)
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


def measure(bare: Any, world_size: int, nbytes: int, blocks: int) -> tuple[float, float, float]:
    """Median microseconds per call with and without, and the median of the differences."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, f"{folder}/meeting", nbytes, blocks, bare, results)
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
        bare = bare_loop() if way == "loops" else None
        guarded, without, cost = measure(bare, world_size, nbytes, options.blocks)
        limit = max(LIMIT_US, LIMIT_SHARE * without)
        bad += cost > limit
        times = (f"{number:.2f}" for number in (without, guarded, cost, limit))
        print(
            "|", " | ".join([way, str(world_size), str(nbytes), *times, f"{os.getloadavg()[0]:.1f}"]), "|", flush=True
        )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())

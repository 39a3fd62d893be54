"""Where the microseconds of a small all_reduce go: each layer is called by itself, ranks pinned where they fit.

Every layer is also called in a group of one rank: what is left then is this process's own work, the rest is the way
between the cores and the wait for the peer.

python benchmarks/call_budget/call_budget.py [ranks] [bytes]
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import unisono

CALLS, ROUNDS, PATIENCE = 2000, 9, 60_000_000_000  # ns: the loops alone do not come back to wait longer


def per_call(call: Callable[[], object]) -> float:
    """Median over rounds of the time of a call, in µs."""
    found = []
    for _ in range(ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(found)


def layers(x: torch.Tensor, group: dist.ProcessGroup | None) -> dict[str, Callable[[], object]]:
    """The same all_reduce entered ever deeper."""
    outer = group or dist.distributed_c10d._get_default_group()
    persistent = unisono.prepare("all_reduce", x, group=group)  # which joins the group
    options = dist.AllreduceOptions()
    options.asyncOp = False
    queue, ways = outer._group.collectives, outer._group.fast_path
    from unisono.backend.reduce_ops import ReduceOps

    prepared = ways.prepared(ReduceOps.all_reduce_kind, "SUM", x, x)
    assert prepared is not None
    at = x.data_ptr()

    def interpreter() -> None:
        number = queue._issued = queue._next_number()
        prepared.run(prepared.address, queue._at, number, PATIENCE, at, at, 0)

    return {
        "dist.all_reduce": lambda: dist.all_reduce(x, group=group),
        "dist.all_reduce, async_op=True, then wait": lambda: dist.all_reduce(x, group=group, async_op=True).wait(),
        "the group's method": lambda: outer.allreduce([x], options),
        "unisono.prepare, called": persistent,
        "the queue": lambda: queue.run_now((prepared, x, x), at, at, outer._seconds, options),
        "the compiled interpreter": interpreter,
    }


def work(rank: int, world_size: int, nbytes: int, path: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    os.environ.update(UNISONO_PIN="1", UNISONO_FUSED="0")
    x = torch.ones(nbytes // 4)
    dist.init_process_group("unisono", f"file://{path}/plain", rank=rank, world_size=world_size)
    found = {"dist.all_reduce, torch's operations alone": per_call(lambda: dist.all_reduce(x))}
    dist.destroy_process_group()
    os.environ["UNISONO_FUSED"] = "now"
    dist.init_process_group("unisono", f"file://{path}/loops", rank=rank, world_size=world_size)
    found |= {name: per_call(call) for name, call in layers(x, None).items()}
    groups = [dist.new_group([one]) for one in range(world_size)]
    alone = {name: per_call(call) for name, call in layers(x, groups[rank]).items()}
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(f"all_reduce of {nbytes} bytes, {world_size} ranks, cores {sorted(os.sched_getaffinity(0))} of rank 0")
        print("      us    alone")
        for name, microseconds in found.items():
            print(f"{microseconds:8.2f} {f'{alone[name]:8.2f}' if name in alone else ' ' * 8}  {name}")


def main() -> None:
    """Starts the ranks."""
    world_size, nbytes = (int(word) for word in (sys.argv[1:] + ["2", "4"][len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory() as path:
        mp.start_processes(work, (world_size, nbytes, path), world_size, start_method="fork")


if __name__ == "__main__":
    main()

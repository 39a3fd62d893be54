"""Large calls on ordinary tensors and on shared ones (unisono.empty), in turn, in the same processes.

python benchmarks/shared_tensors/shared_tensors.py RANKS [MIB ...]
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import unisono
from unisono.transport.process import pin

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def calls(x: torch.Tensor, y: torch.Tensor, ranks: int) -> dict[str, Callable[[], object]]:
    """The calls, on two tensors of the whole size."""
    count = x.numel() // ranks
    return {
        "all_reduce": lambda: dist.all_reduce(x, dist.ReduceOp.MAX),
        "reduce_scatter": lambda: reduce_scatter_single(y[:count], x),
        "all_gather": lambda: all_gather_single(y, x[:count]),
        "all_to_all": lambda: dist.all_to_all_single(y, x),
        "broadcast": lambda: dist.broadcast(x, 0),
    }


def slowest(call: Callable[[], object]) -> float:
    """Seconds of one call on the slowest rank, all beginning together."""
    dist.barrier()
    begun = time.perf_counter()
    call()
    taken = torch.tensor([time.perf_counter() - begun], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def measure(rank: int, ranks: int, meeting: str, sizes: list[int]) -> None:
    """Is one rank; rank 0 prints a line of Markdown per call and size."""
    torch.set_num_threads(1)
    pin(rank, ranks)
    dist.init_process_group("unisono", f"file://{meeting}", rank=rank, world_size=ranks)
    for mib in sizes:
        count = (mib << 20) // 4
        pairs = [calls(make(count).zero_(), make(count).zero_(), ranks) for make in (torch.empty, unisono.empty)]
        for name in pairs[0]:
            runs = [[slowest(pair[name]) for pair in pairs] for _ in range(max(4, min(100, 200 // mib)) + 3)]
            ordinary, shared = (1e6 * statistics.median(side) for side in zip(*runs[3:], strict=True))
            if rank == 0:
                print(f"| {mib} MiB | {name} | {ordinary:.0f} | {shared:.0f} | {ordinary / shared:.2f} |", flush=True)
        del pairs
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    ranks, sizes = int(sys.argv[1]), [int(mib) for mib in sys.argv[2:]] or [1, 16, 256]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (ranks, f"{folder}/meeting", sizes), ranks)


if __name__ == "__main__":
    main()

"""300 broadcasts of 28,000 floats against one broadcast of them all: call by call, and by torch's own coalescing.

python benchmarks/many_broadcasts/many_broadcasts.py [rounds]
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from unisono.transport.process import pin

TENSORS, FLOATS, RANKS = 300, 28_000, 2


def ways(group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    """The same bytes from rank 0 to all."""
    flat = torch.zeros(TENSORS * FLOATS)
    parts = list(torch.zeros(TENSORS * FLOATS).split(FLOATS))
    alone = [torch.zeros(FLOATS) for _ in range(TENSORS)]

    def listed(tensors: list[torch.Tensor]) -> None:
        for work in [dist.broadcast(tensor, 0, group, async_op=True) for tensor in tensors]:
            work.wait()

    return {
        "one broadcast": lambda: dist.broadcast(flat, 0, group),
        "300 broadcasts": lambda: [dist.broadcast(tensor, 0, group) for tensor in parts],
        "300 broadcasts, waited for at the end": lambda: listed(parts),
        "torch's _broadcast_coalesced": lambda: dist._broadcast_coalesced(group, alone, 256 << 20, 0),
    }


def milliseconds(call: Callable[[], object]) -> float:
    """Of one call on the slowest rank, all beginning together."""
    dist.barrier()
    begun = time.perf_counter()
    call()
    taken = torch.tensor([1e3 * (time.perf_counter() - begun)], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def measure(rank: int, rounds: int, meeting: str) -> None:
    """Is one rank; all ways of both libraries take turns."""
    torch.set_num_threads(1)
    pin(rank, RANKS)
    dist.init_process_group("unisono", f"file://{meeting}", rank=rank, world_size=RANKS)
    groups = {"unisono": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    calls = {(way, name): call for name, group in groups.items() for way, call in ways(group).items()}
    found: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for round_ in range(rounds + 2):
        for key, call in calls.items():
            taken = milliseconds(call)
            if round_ >= 2:
                found[key].append(taken)
    if rank == 0:
        middle = {key: statistics.median(times) for key, times in found.items()}
        for way in ways(groups["unisono"]):
            cells = [f"{middle[way, n]:.2f} | {middle[way, n] / middle['one broadcast', n]:.2f}" for n in groups]
            print(f"| {way} | {' | '.join(cells)} |")
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (rounds, f"{folder}/meeting"), RANKS)


if __name__ == "__main__":
    main()

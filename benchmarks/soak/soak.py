"""Small calls of random kind, size, dtype and group, with random sleeps: every value checked, every alarm counted.

    python benchmarks/soak/soak.py --ranks 4 --calls 100000 --seed 1
    python benchmarks/soak/soak.py --hosts 2x2 --link 0.1ms/1gbit --calls 20000  # namespaces of this machine; as root

All ranks draw the same program from the seed; each sleeps now and then for a time of its own. Every result is compared
with what arithmetic says. The last line is the verdict; the exit code is 1 if anything was wrong.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))
from ranks_on_hosts import HOSTS_LIBRARY, rows_of

__all__ = ["walk"]

DTYPES = (torch.float32, torch.int64, torch.float64, torch.int32, torch.bfloat16, torch.uint8)
SIZES = (1, 2, 3, 7, 16, 33, 64, 257, 1000, 5000)
KINDS = (
    "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "scatter", "gather", "barrier",
    "message", "ring", "overlapped",
)  # fmt: skip


def piece(rank: int, call: int, n: int) -> torch.Tensor:
    """What a rank gives to a call: integers small enough to be exact in every dtype, also when four are added."""
    return (torch.arange(n) * 3 + rank * 5 + call) % 16


class Walker:
    """One rank on its way through the program; ``naps``: how likely it sleeps before a call, and how long at most."""

    def __init__(
        self, rank: int, world_size: int, seed: int, naps: tuple[float, float], sizes: Sequence[int] = SIZES
    ) -> None:
        self.rank, self.world_size, self.naps, self.sizes = rank, world_size, naps, sizes
        self.rng, self.nap = random.Random(seed), random.Random(seed * 1000 + rank)
        whole = list(range(world_size))
        lists = [whole, whole[:2], whole[1:], whole[::2]]
        self.groups = [(ranks, dist.new_group(ranks)) for ranks in lists if len(ranks) > 1]
        self.kinds: Counter[str] = Counter()
        self.wrong: list[str] = []

    def step(self, call: int) -> None:
        """One call, on the ranks of a group drawn for it."""
        rng = self.rng
        kind, n, dtype = rng.choice(KINDS), rng.choice(self.sizes), rng.choice(DTYPES)
        ranks, group = rng.choice(self.groups)
        root, background = rng.choice(ranks), rng.random() < 0.3
        if self.nap.random() < self.naps[0]:
            time.sleep(self.nap.random() ** 3 * self.naps[1])
        if self.rank not in ranks:
            return
        self.kinds[kind] += 1
        give = {r: piece(r, call, n).to(dtype) for r in ranks}
        got, wanted = getattr(self, kind)(ranks, group, root, background, give)
        if got is not None and not torch.equal(got, wanted):
            self.wrong.append(f"call {call}: {kind} of {n} {dtype} in {ranks}, root {root}, async {background}")

    def all_reduce(self, ranks: Any, group: Any, root: int, background: bool, give: Any) -> Any:
        """Sums."""
        x = give[self.rank].clone()
        settle(dist.all_reduce(x, group=group, async_op=background))
        return x, total(give.values())

    def overlapped(self, ranks: Any, group: Any, root: int, background: bool, give: Any) -> Any:
        """Three calls under way at once, waited for in another order."""
        x, y, z = give[self.rank].clone(), give[self.rank].clone(), give[self.rank].clone()
        works = [
            dist.all_reduce(x, dist.ReduceOp.MAX, group=group, async_op=True),
            dist.broadcast(y, root, group=group, async_op=True),
            dist.all_reduce(z, group=group, async_op=True),
        ]
        for work in sorted(works, key=lambda _: self.nap.random()):
            settle(work)
        wanted = torch.cat([torch.stack(list(give.values())).amax(0), give[root], total(give.values())])
        return torch.cat([x, y, z]), wanted

    def broadcast(self, ranks: Any, group: Any, root: int, background: bool, give: Any) -> Any:
        """Copies the root's."""
        x = give[self.rank].clone()
        settle(dist.broadcast(x, root, group=group, async_op=background))
        return x, give[root]

    def reduce(self, ranks: Any, group: Any, root: int, background: bool, give: Any) -> Any:
        """Sums at the root; the others' tensors stay."""
        x = give[self.rank].clone()
        settle(dist.reduce(x, root, group=group, async_op=background))
        return x, total(give.values()) if self.rank == root else give[self.rank]

    def all_gather(self, ranks: Any, group: Any, root: int, background: bool, give: Any) -> Any:
        """Everybody's."""
        parts = [torch.empty_like(give[r]) for r in ranks]
        settle(dist.all_gather(parts, give[self.rank], group=group, async_op=background))
        return torch.cat(parts), torch.cat([give[r] for r in ranks])

    def reduce_scatter(self, ranks: Any, group: Any, root: int, background: bool, give: Any) -> Any:
        """This rank's block of the sum; block k of a rank is its piece turned by k."""
        x = torch.empty_like(give[self.rank])
        blocks = [give[self.rank].roll(k) for k in range(len(ranks))]
        settle(dist.reduce_scatter(x, blocks, group=group, async_op=background))
        return x, total(give.values()).roll(ranks.index(self.rank))

    def all_to_all(self, ranks: Any, group: Any, root: int, background: bool, give: Any) -> Any:
        """Blocks of all for this rank."""
        mine = torch.cat([give[self.rank].roll(k) for k in range(len(ranks))])
        x = torch.empty_like(mine)
        settle(dist.all_to_all_single(x, mine, group=group, async_op=background))
        return x, torch.cat([give[r].roll(ranks.index(self.rank)) for r in ranks])

    def scatter(self, ranks: Any, group: Any, root: int, background: bool, give: Any) -> Any:
        """A block of the root's for everybody."""
        x = torch.empty_like(give[self.rank])
        blocks = [give[root].roll(k) for k in range(len(ranks))] if self.rank == root else None
        settle(dist.scatter(x, blocks, root, group=group, async_op=background))
        return x, give[root].roll(ranks.index(self.rank))

    def gather(self, ranks: Any, group: Any, root: int, background: bool, give: Any) -> Any:
        """Everybody's at the root."""
        parts = [torch.empty_like(give[r]) for r in ranks] if self.rank == root else None
        settle(dist.gather(give[self.rank], parts, root, group=group, async_op=background))
        return (torch.cat(parts), torch.cat([give[r] for r in ranks])) if parts else (None, None)

    def barrier(self, ranks: Any, group: Any, root: int, background: bool, give: Any) -> Any:
        """No data."""
        settle(dist.barrier(group, async_op=background))
        return None, None

    def message(self, ranks: Any, group: Any, root: int, background: bool, give: Any) -> Any:
        """From the root to the rank after it."""
        to = ranks[(ranks.index(root) + 1) % len(ranks)]
        if self.rank == root:
            dist.send(give[root], to, group=group)
        if self.rank != to:
            return None, None
        x = torch.empty_like(give[root])
        dist.recv(x, root, group=group)
        return x, give[root]

    def ring(self, ranks: Any, group: Any, root: int, background: bool, give: Any) -> Any:
        """From everybody to the rank after it, all at once."""
        k = ranks.index(self.rank)
        after, before = ranks[(k + 1) % len(ranks)], ranks[k - 1]
        x = torch.empty_like(give[before])
        operations = [
            dist.P2POp(dist.isend, give[self.rank], after, group),
            dist.P2POp(dist.irecv, x, before, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            settle(work)
        return x, give[before]


def settle(work: Any) -> None:
    """Waits for a call that is left to the background."""
    if work is not None:
        work.wait()


def total(tensors: Any) -> torch.Tensor:
    """The sum, exact in each dtype."""
    return torch.stack([t.to(torch.float64) for t in tensors]).sum(0).to(next(iter(tensors)).dtype)


def walk(
    rank: int,
    world_size: int,
    calls: int,
    seed: int,
    naps: tuple[float, float] = (0.01, 0.02),
    sizes: Sequence[int] = SIZES,
) -> tuple[int, list[str], str]:
    """The whole program on one rank: calls made, wrong values, the alarm that ended it early."""
    walker = Walker(rank, world_size, seed, naps, sizes)
    alarm = ""
    try:
        for call in range(calls):
            walker.step(call)
        dist.barrier()
    except RuntimeError as error:
        alarm = f"call {call}: {type(error).__name__}: {error}"
    for _, group in walker.groups:
        dist.destroy_process_group(group)
    return sum(walker.kinds.values()), walker.wrong, alarm


_Found = tuple[int, int, list[str], str]
"""Of a rank: its number, and what `walk` gives."""


def _rank(rank: int, world_size: int, meeting: str, backend: str, calls: int, seed: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    results.put((rank, *walk(rank, world_size, calls, seed)))
    dist.destroy_process_group()


def _on_one_host(options: argparse.Namespace) -> list[_Found]:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, f"{folder}/meeting", options.backend, options.calls, options.seed, results)
        ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        found = sorted(results.get() for _ in ranks)
        for process in ranks:
            process.join()
    return found


def _rank_on_host(job: dict[str, Any]) -> None:
    """A rank on one of several hosts; all write what they found to a folder, rank 0 its path for `rows_of`."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"  # for Gloo, which takes the own name's address
    dist.init_process_group(job["backend"])
    rank = dist.get_rank()
    found = (rank, *walk(rank, dist.get_world_size(), job["calls"], job["seed"]))
    Path(job["folder"], str(rank)).write_text(json.dumps(found))
    if rank == 0:
        Path(job["out"]).write_text("[]")
    dist.destroy_process_group()


def _on_hosts(options: argparse.Namespace) -> list[_Found]:
    with tempfile.TemporaryDirectory() as folder:
        job = {"folder": folder, "backend": options.backend, "calls": options.calls, "seed": options.seed}
        rows_of(__file__, HOSTS_LIBRARY, options.link, options.hosts, job)
        return sorted(json.loads(file.read_text()) for file in Path(folder).iterdir())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hosts", help="hosts x ranks on each, such as 2x2; otherwise one host")
    parser.add_argument("--link", default="0.1ms/1gbit", help="between hosts")
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", default="unisono")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        _rank_on_host(json.loads(options.rank))
        return 0
    start = time.monotonic()
    found = _on_hosts(options) if options.hosts else _on_one_host(options)
    seconds, bad = time.monotonic() - start, 0
    for rank, calls, wrong, alarm in found:
        bad += len(wrong) + bool(alarm)
        print(f"rank {rank}: {calls} calls, {len(wrong)} wrong values, alarms: {alarm or 'none'}")
        print("".join(f"  {line}\n" for line in wrong[:10]), end="")
    verdict = "all right" if not bad else "NOT RIGHT"
    print(f"{options.calls} calls of {len(found)} ranks in {seconds:.0f} s on {options.backend}: {verdict}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())

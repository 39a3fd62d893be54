"""Rows of a mixture of experts to their ranks: counts read on the GPU, or by the host for NCCL, or padded rows.

    torchrun --standalone --nproc-per-node 2 benchmarks/gpu/rows_with_counts.py [--json FILE] [--rounds 5]

Each token has 8 rows of 4,096 bfloat16, whose ranks are drawn at random. Per case, in µs: the replay of a graph of 50
calls, and eager calls (host: until the last is issued; whole: until all are done). The contenders take turns, each
number is the best of the rounds, of the slowest rank. No NVLink multicast.

| contender | what |
| --- | --- |
| unisono | `all_to_all_rows` |
| splits | NCCL's `all_to_all_single` of the counts, which the host then reads, and of the rows; no graph can hold it |
| padded | NCCL's `all_to_all_single` of a quarter more rows than there are on average; filling them in is not counted |
"""

import json
import os
from typing import Any

import torch
import torch.distributed as dist
from fused_norm import captured, eager, replayed, started

from unisono.parallel.expert import all_to_all_rows

__all__: list[str] = []

HIDDEN, TOP, TOKENS = 4096, 8, (1, 16, 256, 4096)


class Case:
    """The contenders for so many tokens a rank."""

    def __init__(self, tokens: int, nccl: Any) -> None:
        rank, self.n, rows = dist.get_rank(), dist.get_world_size(), tokens * TOP
        ranks = torch.randint(self.n, (rows,), generator=torch.Generator().manual_seed(rank)).sort()[0].cuda()
        self.counts = (ranks.unsqueeze(1) == torch.arange(self.n, device="cuda")).sum(0)
        self.x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        self.capacity, self.nccl = rows + rows // 4 + 16, nccl
        self.padded = torch.zeros(self.n * -(-self.capacity // self.n), HIDDEN, device="cuda").bfloat16()
        self.out = torch.empty_like(self.padded)

    def rows(self) -> Any:
        return all_to_all_rows(self.x, self.counts, self.capacity)

    def splits(self) -> torch.Tensor:
        received = torch.empty_like(self.counts)
        dist.all_to_all_single(received, self.counts, group=self.nccl)
        sent, taken = self.counts.tolist(), received.tolist()
        out = self.x.new_empty(sum(taken), HIDDEN)
        dist.all_to_all_single(out, self.x, taken, sent, group=self.nccl)
        return out

    def fixed(self) -> None:
        dist.all_to_all_single(self.out, self.padded, group=self.nccl)

    def measured(self, rounds: int) -> dict[str, dict[str, float]]:
        """By contender: replayed, host, whole."""
        found, should = self.rows()[0], self.splits()
        assert torch.equal(found[: len(should)], should), "rows differ"
        calls = {"unisono": self.rows, "splits": self.splits, "padded": self.fixed}
        stream = torch.cuda.Stream()
        graphs = {name: captured(calls[name], stream) for name in ("unisono", "padded")}
        times: dict[str, dict[str, float]] = {name: {} for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                taken = dict(zip(("host", "whole"), eager(call), strict=True))
                if name in graphs:
                    taken["replayed"] = replayed(graphs[name])
                for what, us in taken.items():
                    times[name][what] = min(us, times[name].get(what, us))
        return times


def main() -> None:
    arguments, nccl = started(__doc__)
    rank, lines = dist.get_rank(), []
    for tokens in TOKENS:
        found = Case(tokens, nccl).measured(arguments.rounds)
        lines.append({"tokens": tokens, "us": found})
        if rank == 0:
            texts = [", ".join(f"{what} {us:.1f}" for what, us in times.items()) for times in found.values()]
            print(f"{tokens} tokens: " + "; ".join(f"{n} {t}" for n, t in zip(found, texts, strict=True)), flush=True)
    if rank == 0 and arguments.json is not None:
        facts = {"gpu": torch.cuda.get_device_name(), "ranks": dist.get_world_size(), "torch": torch.__version__,
                 "nccl": torch.cuda.nccl.version(), "rounds": arguments.rounds, "hidden": HIDDEN}  # fmt: skip
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({**facts, "rows": lines}, indent=1) + "\n")
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)  # NCCL's groups may not end while graphs with their calls live


if __name__ == "__main__":
    main()

"""all_reduce, residual and RMSNorm of a decode step: one kernel, against an all_reduce and a compiled add and norm.

    torchrun --standalone --nproc-per-node 2 benchmarks/gpu/fused_norm.py [--json FILE] [--rounds 5]

Per case, in µs: the replay of a graph of 50 calls, and eager calls (host: until the last is issued; whole: until all
are done). The contenders take turns, each number is the best of the rounds, of the slowest rank. No NVLink multicast.

| contender | what |
| --- | --- |
| fused | `all_reduce_rms_norm` |
| unisono | `dist.all_reduce` by unisono, then the norm compiled by torch |
| symm_mem | torch's one_shot_all_reduce on symmetric memory, then the same |
| nccl | `dist.all_reduce` by NCCL, then the same |
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from unisono.parallel.tensor import all_reduce_rms_norm

__all__: list[str] = []

HIDDEN, TOKENS, EPS = (4096, 8192), (1, 8, 64), 1e-6
CALLS = 50
Contender = Callable[[], Any]


def add_and_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `all_reduce_rms_norm` does after the sum."""
    carried = residual + x
    wide = carried.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.float()).to(x.dtype), carried


class Case:
    """The contenders of a size, on equal tensors. Inputs are zeros where calls in place would let them grow."""

    def __init__(self, hidden: int, tokens: int, compiled: Any, nccl: Any, buffer: torch.Tensor) -> None:
        self.x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        shared = torch.Generator("cuda").manual_seed(1)
        self.residual = torch.randn(tokens, hidden, device="cuda", generator=shared).bfloat16()
        self.weight = torch.randn(hidden, device="cuda", generator=shared).bfloat16()
        self.compiled, self.nccl = compiled, nccl
        self.zeros = torch.zeros_like(self.x)
        self.symmetric = buffer[: tokens * hidden].view(tokens, hidden)
        self.name = nccl.group_name

    def contenders(self) -> dict[str, Contender]:
        """Calls by name."""
        return {"fused": self.fused, "unisono": self.ours, "symm_mem": self.symm_mem, "nccl": self.by_nccl}

    def fused(self) -> Any:
        return all_reduce_rms_norm(self.x, self.residual, self.weight, EPS)

    def ours(self) -> Any:
        dist.all_reduce(self.zeros)
        return self.compiled(self.zeros, self.residual, self.weight)

    def symm_mem(self) -> Any:
        total = torch.ops.symm_mem.one_shot_all_reduce(self.symmetric, "sum", self.name)
        return self.compiled(total, self.residual, self.weight)

    def by_nccl(self) -> Any:
        dist.all_reduce(self.zeros, group=self.nccl)
        return self.compiled(self.zeros, self.residual, self.weight)

    def check(self) -> None:
        """Values of the fused call against the contenders' calls on the same input."""
        norm, carried = self.fused()
        total = self.x.clone()
        dist.all_reduce(total)
        should, sums = self.compiled(total, self.residual, self.weight)
        assert torch.equal(carried, sums), "residuals differ"
        torch.testing.assert_close(norm.float(), should.float(), rtol=2**-6, atol=2**-6)


def slowest(us: float) -> float:
    """Of all ranks."""
    found = torch.tensor(us, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def captured(call: Contender, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of calls, which have been made before."""
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    return graph


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    """µs of a call in a replay."""
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return slowest(begin.elapsed_time(end) / CALLS * 1e3)


def eager(call: Contender) -> tuple[float, float]:
    """µs of a call until the last is issued, and until all are done."""
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    issued = time.perf_counter()
    torch.cuda.synchronize()
    done = time.perf_counter()
    return slowest((issued - start) / CALLS * 1e6), slowest((done - start) / CALLS * 1e6)


def measured(case: Case, rounds: int) -> dict[str, dict[str, float]]:
    """By contender: replayed, host, whole."""
    case.check()
    calls, stream = case.contenders(), torch.cuda.Stream()
    graphs = {name: captured(call, stream) for name, call in calls.items()}
    found: dict[str, dict[str, float]] = {name: {} for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            host, whole = eager(call)
            for what, us in (("replayed", replayed(graphs[name])), ("host", host), ("whole", whole)):
                found[name][what] = min(us, found[name].get(what, us))
    return found


def started(description: str | None) -> tuple[argparse.Namespace, Any]:
    """The command line's arguments and a plain NCCL group, beside the default group of unisono."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("unisono")
    nccl = dist.new_group(backend="nccl")
    return arguments, nccl


def main() -> None:
    arguments, nccl = started(__doc__)
    buffer = symmetric.empty(max(TOKENS) * max(HIDDEN), dtype=torch.bfloat16, device="cuda")
    symmetric.rendezvous(buffer, nccl.group_name)
    buffer.zero_()
    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(add_and_norm, dynamic=False)
    rank, rows = dist.get_rank(), []
    if rank == 0:
        print(f"{torch.cuda.get_device_name()} × {dist.get_world_size()}, torch {torch.__version__}, bfloat16, µs")
    for hidden in HIDDEN:
        for tokens in TOKENS:
            found = measured(Case(hidden, tokens, compiled, nccl, buffer), arguments.rounds)
            rows.append({"hidden": hidden, "tokens": tokens, "us": found})
            if rank == 0:
                times = (f"{name} {t['replayed']:.1f} ({t['host']:.0f}, {t['whole']:.0f})" for name, t in found.items())
                gain = found["nccl"]["replayed"] / found["fused"]["replayed"]
                print(f"hidden {hidden}, {tokens} tokens: {'; '.join(times)}; {gain:.2f}× NCCL", flush=True)
    if rank == 0 and arguments.json is not None:
        facts = {"gpu": torch.cuda.get_device_name(), "ranks": dist.get_world_size(), "torch": torch.__version__,
                 "nccl": torch.cuda.nccl.version(), "rounds": arguments.rounds, "calls": CALLS}  # fmt: skip
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({**facts, "rows": rows}, indent=1, default=list) + "\n")
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)  # NCCL's groups may not end while graphs with their calls live


if __name__ == "__main__":
    main()

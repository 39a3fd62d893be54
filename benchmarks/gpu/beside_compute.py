"""Collectives beside computation on GPUs: matmuls on one stream, calls on another, until both are done.

torchrun --standalone --nproc-per-node 2 benchmarks/gpu/beside_compute.py [--json FILE]

How many of a GPU's multiprocessors kernels may take is a choice: "unisono, 32 blocks" has at most 32 blocks of threads
(a block occupies one multiprocessor, or half of one) and its kernels at every size; "unisono" is what runs by default.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unisono
from unisono.bench.result import this_machine
from unisono.gpu import defaults
from unisono.gpu.devices import describe_gpus
from unisono.torch_names import all_gather_single, reduce_scatter_single
from unisono.units import show_nbytes

WIDTH, MATMULS, RUNS, BLOCKS = 4096, 16, 15, (32, 64, 128)
SIZES = tuple(size << 20 for size in (1, 4, 16, 25, 64))
KERNELS = {"all_reduce": "two_phase", "all_gather": "direct", "reduce_scatter": "direct"}
Call = Callable[[], Any]


def call_of(collective: str, nbytes: int, group: Any) -> Call:
    """One call on bfloat16 tensors; ``nbytes`` counts the whole tensor."""
    whole = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device="cuda")
    part = torch.zeros(nbytes // 2 // dist.get_world_size(), dtype=torch.bfloat16, device="cuda")
    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: all_gather_single(whole, part, group),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole, group=group),
    }
    return calls[collective]


def by_kernels(call: Call, name: str) -> Call:
    """The same by kernels whatever its size."""

    def named() -> None:
        with unisono.algorithm(name):
            call()

    return named


def contenders(collective: str, nbytes: int, groups: dict[str, Any]) -> dict[str, Call | None]:
    """A call of each; a group of so many blocks prepares its kernels at the first call, which is made here."""
    found: dict[str, Call | None] = {}
    usual = defaults.ROWS
    for name, group in groups.items():
        call = call_of(collective, nbytes, group)
        if "blocks" in name:
            call = by_kernels(call, KERNELS[collective])
            defaults.ROWS = int(name.split()[1])
        call()
        defaults.ROWS = usual
        found[name] = call
    torch.cuda.synchronize()
    return found


class Beside:
    """The computation, and the clock: events around everything that a step puts on both streams."""

    def __init__(self) -> None:
        self.a, self.b = (torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.out, self.side = torch.empty_like(self.a), torch.cuda.Stream()
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def step(self, call: Call | None, calls: int, matmuls: int) -> None:
        """Calls are issued evenly between the matmuls, each after what was computed before it, as DDP's buckets are."""
        main, every = torch.cuda.current_stream(), max(1, matmuls // max(1, calls))
        for k in range(max(matmuls, calls)):
            if k < matmuls:
                torch.mm(self.a, self.b, out=self.out)
            if call is not None and (k % every == every - 1 or k >= matmuls) and k // every < calls:
                self.side.wait_stream(main)
                with torch.cuda.stream(self.side):
                    call()
        main.wait_stream(self.side)

    def taken(self, call: Call | None, calls: int, matmuls: int) -> float:
        """Seconds of one step."""
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(3_000_000)  # the host queues the whole step meanwhile
        self.events[0].record()
        self.step(call, calls, matmuls)
        self.events[1].record()
        torch.cuda.synchronize()
        return self.events[0].elapsed_time(self.events[1]) / 1e3

    def seconds(self, calls: dict[str, Call | None], count: int, matmuls: int) -> dict[str, float]:
        """Of each contender, on the slowest rank: the median of steps that they take by turns."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for run in range(RUNS + 2):
            for name, call in calls.items():
                taken = self.taken(call, count, matmuls)
                if run >= 2:
                    times[name].append(taken)
        medians = torch.tensor([statistics.median(each) for each in times.values()], dtype=torch.float64)
        dist.all_reduce(medians, dist.ReduceOp.MAX)
        return dict(zip(calls, medians.tolist(), strict=True))


def rows_of(collective: str, nbytes: int, groups: dict[str, Any], beside: Beside) -> list[dict[str, Any]]:
    """Every contender at one size: as many calls as NCCL makes in the time of the matmuls, at most one after each."""
    calls = contenders(collective, nbytes, groups)
    computing = beside.seconds({"": None}, 0, MATMULS)[""]
    pace = beside.seconds({"": calls["nccl"]}, 4, 0)[""] / 4
    count = max(1, min(MATMULS, round(computing / pace)))
    alone, together = (beside.seconds(calls, count, matmuls) for matmuls in (0, MATMULS))
    return [
        {"collective": collective, "nbytes": nbytes, "contender": name, "calls": count, "matmuls": computing,
         "alone": alone[name], "together": together[name]}
        for name in calls
    ]  # fmt: skip


def main() -> None:
    """Measure, print a table, write the numbers as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "beside_compute_new.json")
    file = parser.parse_args().json
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("unisono")
    groups = {"unisono": dist.group.WORLD, "nccl": dist.new_group(backend="nccl")}
    groups |= {f"unisono, {blocks} blocks": dist.new_group(backend="unisono") for blocks in BLOCKS}
    first, beside, rows = dist.get_rank() == 0, Beside(), []
    machine = vars(this_machine(gpu=describe_gpus(dist.get_world_size())))
    if first:
        print(f"# {machine['gpu']}; {MATMULS} matmuls of {WIDTH} x {WIDTH}, bfloat16; ms\n")
        print("| | bytes | calls | | matmuls alone | calls alone | together | x NCCL |")
        print("| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for collective in KERNELS:
        for nbytes in SIZES:
            found = rows_of(collective, nbytes, groups, beside)
            rows += found
            if first:
                whole = {row["contender"]: row["together"] for row in found}
                for row in found:
                    times = " | ".join(f"{1e3 * row[key]:.2f}" for key in ("matmuls", "alone", "together"))
                    named = f"{collective} | {show_nbytes(nbytes)} | {row['calls']} | {row['contender']}"
                    print(f"| {named} | {times} | {row['together'] / whole['nccl']:.3f} |", flush=True)
                file.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Training steps with DDP and FSDP2 on unisono, on Gloo and without communication; writes README.md here.

python benchmarks/training_steps/training_steps.py [--ranks 2,4] [--seconds 20]
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from unisono.bench.result import Machine, this_machine
from unisono.bench.settings import cores
from unisono.train.settings import ModelShape
from unisono.train.trainer import ByteTransformer

HERE = Path(__file__).parent
MODELS = {  # shape, sequences of all ranks together
    "main job": (ModelShape(), 16),
    "25 million": (ModelShape(width=512, layers=8, heads=8, context=64), 4),
}
KINDS = {"DDP": ("none", "silent", "unisono", "gloo"), "FSDP2": ("none", "unisono", "gloo")}
FEWEST = 12  # steps of each way

TEXT = """# Training steps: unisono, Gloo, no communication

**What is asked**: the ratios, and what still separates unisono from no communication at all. A step is forward,
backward, gradients averaged, AdamW; plain torch DDP and FSDP2 (`fully_shard` on every block and on the whole), the
same in every column but for the process group. "None" is the same model and batch, unwrapped.

{tables}
Times in ms. The ways take turns step by step in the same processes, each step after a barrier, in an order that turns
round; a step's time is that of its slowest rank, the number its median over all rounds. One thread per rank, and each
rank keeps to an equal share of the cores. "silent" is DDP with a hook that sends nothing: what DDP itself takes. "left"
is what unisono's step takes beyond the step without communication, as a share of that; FSDP2 also splits the
optimizer's work over the ranks, which no communication at all does not. Tables without "silent" are older: there each
way made a block of steps at a time, so that a slow moment of the machine fell on one way.

    python benchmarks/training_steps/training_steps.py --ranks 2,4

measures this machine and writes this page, with the results of other machines that lie beside as steps_WHERE.json.
"""


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, windows: torch.Tensor) -> None:
    """One step on (sequences, context + 1) bytes."""
    logits = model(windows[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def send_nothing(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DDP's that leaves the gradients as they are."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def stepper(kind: str, way: str, name: str, groups: dict[str, Any], rank: int, size: int) -> Callable[[], None]:
    """A function that makes one step."""
    shape, batch = MODELS[name]
    torch.manual_seed(0)
    model: torch.nn.Module = ByteTransformer(shape)
    if way != "none" and kind == "DDP":
        model = DistributedDataParallel(model, process_group=groups["unisono" if way == "silent" else way])
        if way == "silent":
            model.register_comm_hook(None, send_nothing)
    elif way != "none":
        mesh = DeviceMesh.from_group(groups[way], "cpu")
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    windows = torch.randint(256, (max(1, batch // size), shape.context + 1))
    return lambda: train_step(model, optimizer, windows)


def rank_main(rank: int, size: int, store: str, seconds: float, pipe: Any) -> None:
    """Measure on one rank; rank 0 sends {(model, kind, way): seconds of a step}."""
    torch.set_num_threads(1)
    share = len(cores()) // size
    if share:
        os.sched_setaffinity(0, cores()[rank * share : (rank + 1) * share])
    dist.init_process_group("unisono", init_method=f"file://{store}", rank=rank, world_size=size)
    groups = {"unisono": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    found = {}
    for name in MODELS:
        for kind, ways in KINDS.items():
            steps = {way: stepper(kind, way, name, groups, rank, size) for way in ways}
            for way in ways * 2:
                timed(steps[way])
            rounds = FEWEST
            times: dict[str, list[float]] = {way: [] for way in ways}
            for count in itertools.count():
                turn = count % len(ways)
                for way in ways[turn:] + ways[:turn]:
                    times[way].append(timed(steps[way]))
                if count == 0:  # the same on all ranks, as the times are
                    rounds = max(FEWEST, int(seconds / sum(map(sum, times.values()))))
                if count == rounds:
                    break
            found.update({(name, kind, way): statistics.median(taken) for way, taken in times.items()})
    if rank == 0:
        pipe.send(found)
    dist.destroy_process_group()


def timed(step: Callable[[], None]) -> float:
    """Seconds that the slowest rank takes."""
    dist.barrier()
    began = time.perf_counter()
    step()
    taken = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def measure(size: int, seconds: float) -> dict[tuple[str, str, str], float]:
    """Start ``size`` ranks and return rank 0's numbers."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, size, f"{folder}/store", seconds, writer) for rank in range(size)]
        processes = [context.Process(target=rank_main, args=some, daemon=True) for some in arguments]
        for process in processes:
            process.start()
        writer.close()
        found: dict[tuple[str, str, str], float] = reader.recv()
        for process in processes:
            process.join()
    return found


def table(file: Path) -> str:
    """The numbers in ``file``, and what they were measured on."""
    data = json.loads(file.read_text())
    lines = [
        "| model | | ranks | none | silent | unisono | gloo | gloo / unisono | left |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in data["rows"]:
        none, mine, gloo = (1e3 * row[way] for way in KINDS["FSDP2"])
        silent = f"{1e3 * row['silent']:.1f}" if "silent" in row else ""
        lines.append(
            f"| {row['model']}, {row['parameters']:,} parameters | {row['kind']} | {row['ranks']} | {none:.1f} | "
            f"{silent} | {mine:.1f} | {gloo:.1f} | **{gloo / mine:.2f}** | {mine / none - 1:+.0%} |"
        )
    machine = Machine(**data["machine"])
    fitting = [str(n) for n in sorted({row["ranks"] for row in data["rows"]}) if n <= machine.cores]
    pinned = f"a core for each at {' and '.join(fitting)} ranks" if fitting else "not pinned"
    return "\n".join(lines) + f"\n\n{machine.words()}; {pinned}; load before the run {machine.load:.1f}.\n"


def write() -> None:
    """README.md from the numbers beside it."""
    (HERE / "README.md").write_text(TEXT.format(tables="\n".join(map(table, sorted(HERE.glob("steps*.json"))))))


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4", help="rank counts, by comma")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each model and kind")
    arguments = parser.parse_args()
    machine, rows = this_machine(), []
    parameters = {
        name: sum(p.numel() for p in ByteTransformer(shape).parameters()) for name, (shape, *_) in MODELS.items()
    }
    for size in map(int, arguments.ranks.split(",")):
        found = measure(size, arguments.seconds)
        for name in MODELS:
            for kind, ways in KINDS.items():
                times = {way: found[name, kind, way] for way in ways}
                rows.append({"model": name, "parameters": parameters[name], "kind": kind, "ranks": size, **times})
                print(rows[-1], flush=True)
    data = {"machine": asdict(machine), "rows": rows}
    (HERE / "steps.json").write_text(json.dumps(data, indent=1) + "\n")
    write()


if __name__ == "__main__":
    main()

"""Training steps with DDP and FSDP2 on unisono, on Gloo and without communication; writes README.md here.

python benchmarks/training_steps/training_steps.py [--ranks 2,4] [--rounds 5]
"""

import argparse
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
from unisono.train.model import ByteTransformer
from unisono.train.settings import ModelShape

HERE = Path(__file__).parent
MODELS = {  # shape, sequences of all ranks together, steps of a block
    "main job": (ModelShape(), 16, 10),
    "25 million": (ModelShape(width=512, layers=8, heads=8, context=64), 4, 1),
}
WAYS = ("none", "unisono", "gloo")

TEXT = """# Training steps: unisono, Gloo, no communication

**What is asked**: the ratios, and what still separates unisono from no communication at all. A step is forward,
backward, gradients averaged, AdamW; plain torch DDP and FSDP2 (`fully_shard` on every block and on the whole), the
same in every column but for the process group. "None" is the same model and batch, unwrapped.

{tables}
Times in ms. The three ways take turns block by block in the same processes, one thread per rank. "left" is what
unisono's step takes beyond the step without communication, as a share of that; FSDP2 also splits the optimizer's work
over the ranks, which no communication at all does not. DDP in itself, with a hook that sends nothing, took 3 to 8% more
than "none" for the main job at 2 ranks. Each rank keeps to an equal share of the cores. The table of 16 cores was taken
with a worker thread that spun for a millisecond wherever a peer was late, and so took a part of its rank's cores from
the computation; since then it sleeps, which has not been measured there yet.

    python benchmarks/training_steps/training_steps.py --ranks 2,4

measures this machine and writes this page, with the results of other machines that lie beside as steps_WHERE.json.
"""


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, windows: torch.Tensor) -> None:
    """One step on (sequences, context + 1) bytes."""
    logits = model(windows[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def stepper(kind: str, way: str, name: str, groups: dict[str, Any], rank: int, size: int) -> Callable[[], None]:
    """A function that makes one step."""
    shape, batch, _ = MODELS[name]
    torch.manual_seed(0)
    model: torch.nn.Module = ByteTransformer(shape)
    if way != "none" and kind == "DDP":
        model = DistributedDataParallel(model, process_group=groups[way])
    elif way != "none":
        mesh = DeviceMesh.from_group(groups[way], "cpu")
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    windows = torch.randint(256, (max(1, batch // size), shape.context + 1))
    return lambda: train_step(model, optimizer, windows)


def rank_main(rank: int, size: int, store: str, rounds: int, pipe: Any) -> None:
    """Measure on one rank; rank 0 sends {(model, kind, way): seconds of a step}."""
    torch.set_num_threads(1)
    share = len(cores()) // size
    if share:
        os.sched_setaffinity(0, cores()[rank * share : (rank + 1) * share])
    dist.init_process_group("unisono", init_method=f"file://{store}", rank=rank, world_size=size)
    groups = {"unisono": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    found = {}
    for name, (_, _, block) in MODELS.items():
        for kind in ("DDP", "FSDP2"):
            steps = {way: stepper(kind, way, name, groups, rank, size) for way in WAYS}
            for step in steps.values():
                step()
                step()
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(rounds):
                for way, step in steps.items():
                    dist.barrier()
                    began = time.perf_counter()
                    for _ in range(block):
                        step()
                    taken = torch.tensor([(time.perf_counter() - began) / block], dtype=torch.float64)
                    dist.all_reduce(taken, dist.ReduceOp.MAX)
                    times[way].append(taken.item())
            found.update({(name, kind, way): statistics.median(seconds) for way, seconds in times.items()})
    if rank == 0:
        pipe.send(found)
    dist.destroy_process_group()


def measure(size: int, rounds: int) -> dict[tuple[str, str, str], float]:
    """Start ``size`` ranks and return rank 0's numbers."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, size, f"{folder}/store", rounds, writer) for rank in range(size)]
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
        "| model | | ranks | none | unisono | gloo | gloo / unisono | left |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in data["rows"]:
        none, mine, gloo = (1e3 * row[way] for way in WAYS)
        lines.append(
            f"| {row['model']}, {row['parameters']:,} parameters | {row['kind']} | {row['ranks']} | {none:.1f} | "
            f"{mine:.1f} | {gloo:.1f} | **{gloo / mine:.2f}** | {mine / none - 1:+.0%} |"
        )
    machine = Machine(**data["machine"])
    fitting = [str(n) for n in sorted({row["ranks"] for row in data["rows"]}) if n <= machine.cores]
    pinned = f"a core for each at {' and '.join(fitting)} ranks" if fitting else "not pinned"
    return (
        "\n".join(lines) + f"\n\n{machine.words()}; {pinned}; load before the run {machine.load:.1f}; medians over "
        f"{data['rounds']} blocks of steps.\n"
    )


def write() -> None:
    """README.md from the numbers beside it."""
    (HERE / "README.md").write_text(TEXT.format(tables="\n".join(map(table, sorted(HERE.glob("steps*.json"))))))


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4", help="rank counts, by comma")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of steps per way")
    arguments = parser.parse_args()
    machine, rows = this_machine(), []
    parameters = {
        name: sum(p.numel() for p in ByteTransformer(shape).parameters()) for name, (shape, *_) in MODELS.items()
    }
    for size in map(int, arguments.ranks.split(",")):
        found = measure(size, arguments.rounds)
        for name in MODELS:
            for kind in ("DDP", "FSDP2"):
                times = {way: found[name, kind, way] for way in WAYS}
                rows.append({"model": name, "parameters": parameters[name], "kind": kind, "ranks": size, **times})
                print(rows[-1], flush=True)
    data = {"machine": asdict(machine), "rounds": arguments.rounds, "rows": rows}
    (HERE / "steps.json").write_text(json.dumps(data, indent=1) + "\n")
    write()


if __name__ == "__main__":
    main()

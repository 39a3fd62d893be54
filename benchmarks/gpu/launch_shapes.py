"""How large tiles and how many blocks of threads a kernel should have: every shape that fits, by graph replay.

torchrun --standalone --nproc-per-node 2 benchmarks/gpu/launch_shapes.py [--json FILE]

What runs by default is the first row of each size; `gpu/defaults.py` keeps the choice. With more blocks than
multiprocessors two of them must fit on each, and other groups' kernels have to wait.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import unisono
from unisono.bench.clocks import GraphClock
from unisono.bench.result import this_machine
from unisono.gpu import kernels
from unisono.gpu.defaults import LaunchShape, launch_shape
from unisono.gpu.devices import describe_gpus
from unisono.gpu.layout import HALF_NBYTES, ROWS
from unisono.torch_names import all_gather_single, reduce_scatter_single
from unisono.units import show_nbytes

KIB, MIB, ITEMSIZE = 1 << 10, 1 << 20, 2  # bfloat16
CASES = {
    ("all_reduce", "one_shot"): (64 * KIB, 256 * KIB, 1 * MIB),
    ("all_reduce", "two_phase"): (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB),
    ("all_gather", "direct"): (64 * KIB, 1 * MIB, 16 * MIB, 64 * MIB),
    ("reduce_scatter", "direct"): (1 * MIB, 16 * MIB, 64 * MIB),
    ("all_to_all", "direct"): (1 * MIB, 16 * MIB, 64 * MIB),
    ("broadcast", "star"): (1 * MIB, 8 * MIB, 16 * MIB),
}
TILES = {1 * KIB: (1, 2), 2 * KIB: (4,), 4 * KIB: (4, 8), 8 * KIB: (8,), 16 * KIB: (16,), 32 * KIB: (16, 32)}
"""Warps by bytes of a tile."""
BLOCKS = (32, 64, 128)
CALLS, REPLAYS = 20, 5


def shapes(part: int, slots: int, multiprocessors: int) -> Iterator[LaunchShape]:
    """The default, then all others for chunks of ``part`` elements that fit into ``slots`` of staging memory."""
    usual = launch_shape(part, ITEMSIZE, slots, multiprocessors)
    yield usual
    for nbytes, choices in TILES.items():
        tile = nbytes // ITEMSIZE
        tiles = -(-part // tile)
        if max(1, slots) * nbytes > HALF_NBYTES or tiles < 4:
            continue
        for warps in choices:
            most = min(ROWS, 2 * multiprocessors if warps <= 16 else multiprocessors)
            for blocks in sorted({min(tiles, blocks) for blocks in BLOCKS if blocks <= most}):
                shape = LaunchShape(tile, warps, blocks, blocks == tiles)
                if tiles <= 64 * blocks and shape != usual:
                    yield shape


def call_of(collective: str, nbytes: int) -> Callable[[], Any]:
    """One call; ``nbytes`` counts the whole tensor."""
    whole = torch.zeros(nbytes // ITEMSIZE, dtype=torch.bfloat16, device="cuda")
    other = torch.zeros_like(whole)
    part = whole[: len(whole) // dist.get_world_size()].clone()
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: all_gather_single(whole, part),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    return calls[collective]


def measured(call: Callable[[], Any], shape: LaunchShape) -> float:
    """Seconds of a call with kernels of that shape, on the slowest rank."""
    calls = dist.group.WORLD._cuda
    calls._launches.clear()
    calls._kinds.clear()
    kernels.launch_shape = lambda *_: shape
    call()
    clock = GraphClock(call)
    taken = []
    for _ in range(REPLAYS):
        dist.barrier()
        taken.append(clock.seconds(CALLS))
    clock.close()
    slowest = torch.tensor([statistics.median(taken)], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def asked(call: Callable[[], Any]) -> tuple[int, int, int]:
    """What a kind of call asks of `launch_shape`: elements of a chunk, slots, multiprocessors."""
    found: list[tuple[int, int, int]] = []

    def note(part: int, itemsize: int, slots: int, multiprocessors: int) -> LaunchShape:
        found.append((part, slots, multiprocessors))
        return launch_shape(part, itemsize, slots, multiprocessors)

    kernels.launch_shape = note
    call()
    return found[0]


def main() -> None:
    """Measure, print a table, write the numbers as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "launch_shapes_new.json")
    file = parser.parse_args().json
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("unisono", timeout=timedelta(seconds=30))  # of shapes that do not fit on the GPU at once
    first, rows = dist.get_rank() == 0, []
    machine = vars(this_machine(gpu=describe_gpus(dist.get_world_size())))
    if first:
        print(f"# {machine['gpu']}, bfloat16; µs, and times as fast as the default\n")
        print("| | | bytes | tile | warps | blocks | µs | x |\n| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for (collective, schedule), sizes in CASES.items():
        for nbytes in sizes:
            with unisono.algorithm(schedule):
                call = call_of(collective, nbytes)
                found = [(measured(call, shape), shape) for shape in shapes(*asked(call))]
            usual = found[0][0]
            shown = [found[0], *sorted(found[1:], key=lambda each: each[0])[:4]]
            rows += [
                {"collective": collective, "schedule": schedule, "nbytes": nbytes, "seconds": seconds,
                 "tile": shape.tile * ITEMSIZE, "warps": shape.warps, "blocks": shape.blocks}
                for seconds, shape in found
            ]  # fmt: skip
            if first:
                for seconds, shape in shown:
                    numbers = f"{show_nbytes(shape.tile * ITEMSIZE)} | {shape.warps} | {shape.blocks}"
                    speed = f"{1e6 * seconds:.2f} | {usual / seconds:.3f}"
                    print(f"| {collective} | {schedule} | {show_nbytes(nbytes)} | {numbers} | {speed} |", flush=True)
                file.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Decoding with tensor parallelism: a small random Llama, greedy, tokens per second by every backend that is there.

torchrun --nproc-per-node 2 examples/13_decode.py               (on GPUs also in CUDA graphs, which replay a step)
"""

import os
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from decoding import Llama, Shape, apart, summed, symmetric

from unisono.parallel.tensor import all_reduce_rms_norm

ON_GPU = torch.cuda.is_available()
SHAPE = Shape(4096, 32, 8, 32_000, 200) if ON_GPU else Shape(64, 4, 2, 97, 12)


def decode(model: Llama, step: Callable[[], None]) -> tuple[list[int], float]:
    """The tokens, and how many a second."""
    for _ in range(2):  # the first time to warm up
        model.begin()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(SHAPE.steps):
            step()
        text = model.text.tolist()
        taken = time.perf_counter() - began
    return text, SHAPE.steps / taken


def main() -> None:
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    if ON_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("unisono")
    other = dist.new_group(backend="nccl" if ON_GPU else "gloo")
    ways = {"unisono": all_reduce_rms_norm, "unisono, norms apart": summed(dist.group.WORLD)}
    ways["NCCL" if ON_GPU else "Gloo"] = summed(other)
    if ON_GPU:
        ways["symmetric memory"] = symmetric(other, SHAPE.width)
    place = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    model, whole = Llama(SHAPE, dist.get_rank(), dist.get_world_size(), *place), Llama(SHAPE, 0, 1, *place)
    wanted, _ = decode(whole, partial(whole.step, apart(lambda x: x)))
    for name, add_and_norm in ways.items():
        found = {"eager": decode(model, partial(model.step, add_and_norm))}
        if ON_GPU:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                model.step(add_and_norm)
            found["in a CUDA graph"] = decode(model, graph.replay)
            graph.reset()
        for how, (text, rate) in found.items():
            same = sum(a == b for a, b in zip(text, wanted, strict=True))
            if dist.get_rank() == 0:
                print(f"{name}, {how}: {rate:.0f} tokens/s, {same} of {SHAPE.steps} as of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

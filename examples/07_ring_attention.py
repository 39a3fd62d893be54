"""Ring attention: a causal sequence over all ranks, in balance or not; then tree attention decodes after it.

torchrun --nproc-per-node 2 examples/07_ring_attention.py                (BACKEND=gloo for another backend)
"""

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import unisono  # noqa: F401  (not needed where torch loads the backend by its entry point)
from unisono.parallel.sequence import ShardedKVCache, ring_attention, shard_sequence, unshard_sequence
from unisono.units import show_seconds

HEADS, LENGTH, WIDTH = 4, 768, 32


def over_ring(inputs: list[Tensor], layout: str) -> tuple[list[Tensor], float]:
    """The result and the gradients of query, key and value, whole again; and the seconds it took."""
    parts = [shard_sequence(tensor, 1, layout=layout).requires_grad_() for tensor in inputs]
    dist.barrier()
    began = time.perf_counter()
    y = ring_attention(*parts, causal=True, layout=layout)
    y.pow(2).sum().backward()
    dist.barrier()
    seconds = time.perf_counter() - began
    return [unshard_sequence(part, 1, layout=layout) for part in (y.detach(), *(p.grad for p in parts))], seconds


def main() -> None:
    dist.init_process_group(os.environ.get("BACKEND", "unisono"))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs = [torch.randn(HEADS, LENGTH, WIDTH) for _ in range(3)]

    alone = [tensor.clone().requires_grad_() for tensor in inputs]
    y = F.scaled_dot_product_attention(*alone, is_causal=True)
    y.pow(2).sum().backward()
    expected = [y.detach(), *(tensor.grad for tensor in alone)]

    for layout in ("contiguous", "zigzag"):
        results, seconds = over_ring(inputs, layout)
        apart = max(((a - b).norm() / b.norm()).item() for a, b in zip(results, expected, strict=True))
        if dist.get_rank() == 0:
            print(f"{layout}: within 1e-5 of one process: {apart < 1e-5}, {show_seconds(seconds)}")

    cache = ShardedKVCache()
    cache.append(*inputs[1:])  # the prompt, dealt out to the ranks
    query, key, value = (torch.randn(HEADS, 1, WIDTH) for _ in range(3))
    cache.append(key, value)  # one token more, kept by one of them
    whole = (torch.cat((old, new), 1) for old, new in zip(inputs[1:], (key, value), strict=True))
    apart = (cache.attend(query) - F.scaled_dot_product_attention(query, *whole)).abs().max().item()
    if dist.get_rank() == 0:
        print(f"decoding against {cache.length} keys on {dist.get_world_size()} ranks: within 1e-5: {apart < 1e-5}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Data, tensor and pipeline parallel at once: a transformer over a mesh, its loss that of one process; a checkpoint.

torchrun --nproc-per-node 8 examples/06_three_dimensions.py                 (4 ranks will do; BACKEND=gloo as well)
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F

import unisono  # noqa: F401  (not needed where torch loads the backend by its entry point)
from unisono.parallel import mesh as meshes
from unisono.parallel.mesh import CommunicationMeter, MeshTransformer, ParallelDims, Transformer

VOCABULARY, CONTEXT, ROWS, STEPS = 29, 16, 16, 8


def whole() -> Transformer:
    torch.manual_seed(0)  # the same weights on all ranks
    return Transformer(width=32, layers=4, heads=4, context=CONTEXT, vocabulary=VOCABULARY)


def batch(step: int) -> torch.Tensor:
    """Sequences that count up by 1 to 3; the whole batch on every rank, which takes its own part."""
    start, pace = torch.randint(VOCABULARY * 3, (2, ROWS, 1), generator=torch.Generator().manual_seed(step))
    return (start + (1 + pace % 3) * torch.arange(CONTEXT + 1)) % VOCABULARY


def train_alone() -> float:
    model = whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for windows in map(batch, range(STEPS)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


def train(model: MeshTransformer, optimizer: torch.optim.Optimizer, steps: range) -> float:
    for step in steps:
        optimizer.zero_grad()
        loss = model.step(batch(step))
        model.clip_grad_norm_(1.0)
        optimizer.step()
    return loss.item()


def main() -> None:
    dist.init_process_group(os.environ.get("BACKEND", "unisono"))
    say = print if dist.get_rank() == 0 else lambda line: None
    with tempfile.TemporaryDirectory() as own:
        dist.broadcast_object_list(folder := [own])  # that of rank 0
        for shape in (ParallelDims(dp=dist.get_world_size() // 4, tp=2, pp=2), ParallelDims(dp=dist.get_world_size())):
            mesh = shape.build_mesh()
            model = MeshTransformer(whole(), mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            if shape.pp > 1:  # the first mesh; the second one goes on from there
                train(model, optimizer, range(STEPS - 5))
                meshes.save_mesh_checkpoint(folder[0], model, optimizer)
            meshes.load_mesh_checkpoint(folder[0], model, optimizer)
            with CommunicationMeter(mesh) as meter:
                loss = train(model, optimizer, range(STEPS - 5, STEPS))
            held = f"layers {[*model.layers[0]]}, {sum(weight.numel() for weight in model.parameters())} parameters"
            say(f"{shape}: rank 0 holds {held}; loss {loss:.5f}")
            say(", ".join(f"{axis}: {traffic.nbytes // 5} bytes a step" for axis, traffic in meter.traffic.items()))
    say(f"one process: loss {train_alone():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

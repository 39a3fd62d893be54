"""Programs of torch on two GPUs, a process for each: the losses of plain NCCL over 50 steps."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gpu.world import NEEDS_GPU
from ranks import FORKS

pytestmark = [
    NEEDS_GPU,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs"),
]
STEPS, WIDTH, BATCH = 50, 128, 32
DEVICE = os.environ.get("UNISONO_TEST_DEVICE", "cuda")  # "cpu": the programs themselves, against Gloo
Steps = Iterator[float]


def mlp() -> nn.Sequential:
    """The same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(DEVICE)


def data(step: int, rank: int, *shape: int) -> Tensor:
    """Numbers of a rank and step."""
    return torch.randn(shape or (BATCH, WIDTH), generator=torch.Generator().manual_seed(100 * step + rank)).to(DEVICE)


def trained(model: nn.Module, optimizer: Any, rank: int) -> Steps:
    """The losses of steps on a rank's own data."""
    for step in range(STEPS):
        x = data(step, rank)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def adam(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3, **more)


def hsdp(rank: int, folder: Path) -> Steps:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for shape in ((2, 1), (1, 2)):
        mesh, model = init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard")), mlp()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        yield from trained(model, adam(model), rank)


def zero(rank: int, folder: Path) -> Steps:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(mlp())
    yield from trained(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3), rank)


def compiled_data_parallel(rank: int, folder: Path) -> Steps:
    from torch.nn.parallel import DistributedDataParallel

    model = torch.compile(DistributedDataParallel(mlp()))
    yield from trained(model, adam(model), rank)


def compiled_tensor_parallel(rank: int, folder: Path) -> Steps:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = parallelize_module(mlp(), init_device_mesh(DEVICE, (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model.compile()
    yield from trained(model, adam(model), 0)


def pipelined(schedule: str, rank: int) -> Steps:
    """Stages of a rank: 0 and 1; or of a V, 0 and 3 on rank 0."""
    from torch.distributed import pipelining

    kind, v = getattr(pipelining.schedules, schedule), "ZBV" in schedule
    numbers = (rank, 3 - rank) if v else (rank,)
    layers = [mlp() for _ in range(4 if v else 2)]
    stages = [pipelining.PipelineStage(layers[k], k, len(layers), torch.device(DEVICE, rank)) for k in numbers]
    optimizer = adam(nn.ModuleList(layers[k] for k in numbers))
    runner = kind(stages if v else stages[0], 4, loss_fn=F.mse_loss)
    for step in range(STEPS):
        x, losses = data(step, 0), list[Tensor]()
        given = {"target": x.roll(1, 1), "losses": losses} if len(layers) - 1 in numbers else {}
        runner.step(*[x] * (rank == 0), **given)
        optimizer.step()
        optimizer.zero_grad()
        yield torch.stack(losses).mean().item() if losses else 0.0


def one_forward_one_backward(rank: int, folder: Path) -> Steps:
    yield from pipelined("Schedule1F1B", rank)


def zero_bubble_v(rank: int, folder: Path) -> Steps:
    yield from pipelined("ScheduleZBVZeroBubble", rank)


def context_parallel(rank: int, folder: Path) -> Steps:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh, model = init_device_mesh(DEVICE, (2,)), mlp().bfloat16()
    torch.manual_seed(1)
    project = nn.Linear(WIDTH, 3 * WIDTH, device=DEVICE, dtype=torch.bfloat16)
    both = nn.ModuleList([model, project])
    optimizer = adam(both)
    for step in range(STEPS):
        x = data(step, 0, 2, 512, WIDTH).bfloat16()
        y = x.roll(1, 2)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), context_parallel(mesh, buffers=(x, y), buffer_seq_dims=(1, 1)):
            heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in project(x).chunk(3, -1)]
            attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
            loss = (model(attended) - y).float().square().mean()
            loss.backward()
        for parameter in both.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def checkpoints(rank: int, folder: Path) -> Steps:
    """FSDP2, saved while it trains on, and loaded into a model of other weights, which then has the same losses."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def state() -> dict[str, Any]:
        return dict(zip(("weights", "moments"), get_state_dict(model, optimizer), strict=True))

    mesh = init_device_mesh(DEVICE, (2,))
    model = fully_shard(mlp(), mesh=mesh)
    optimizer = adam(model)
    yield from trained(model, optimizer, rank)
    dcp.save(state(), checkpoint_id=folder / "at once")
    own = dist.new_group()  # its calls come from another thread, beside those of the training
    saving = dcp.async_save(state(), checkpoint_id=folder / "beside", process_group=own)
    went_on = list(trained(model, optimizer, rank))
    saving.result()
    for kept in ("at once", "beside"):
        other = mlp()
        nn.init.ones_(other[0].weight)
        model = fully_shard(other, mesh=mesh)
        optimizer = adam(model)
        found = state()
        dcp.load(found, checkpoint_id=folder / kept)
        set_state_dict(model, optimizer, model_state_dict=found["weights"], optim_state_dict=found["moments"])
        again = list(trained(model, optimizer, rank))
        assert again == went_on, f"{kept}: {again[:3]} for {went_on[:3]}"
    yield from went_on


PROGRAMS: list[Callable[[int, Path], Steps]] = [
    hsdp, zero, compiled_data_parallel, compiled_tensor_parallel, one_forward_one_backward, zero_bubble_v,
    context_parallel, checkpoints,
]  # fmt: skip


def by_both(rank: int, path: Path, result: Any, program: Callable[[int, Path], Steps]) -> None:
    """The losses of a rank, by unisono and by what it is compared with."""
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    found = []
    for name, backend in (("ours", "unisono"), ("theirs", "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")):
        dist.init_process_group(backend, init_method=f"file://{path}/meeting of {name}", rank=rank, world_size=2)
        found.append(list(program(rank, path / f"kept by {name}")))
        torch._dynamo.reset()
        dist.destroy_process_group()
    result.put(found)


@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_of_nccl(tmp_path: Path, program: Callable[[int, Path], Steps]) -> None:
    result = FORKS.Queue()
    processes = [FORKS.Process(target=by_both, args=(rank, tmp_path, result, program)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        found = [result.get(timeout=200) for _ in processes]
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    apart = 2e-2 if program is context_parallel else 1e-4  # bfloat16: sums in another order
    for ours, theirs in found:
        assert len(ours) >= STEPS
        assert ours == pytest.approx(theirs, rel=apart, abs=1e-6)
        assert ours[-1] < ours[0] or not ours[0]  # a rank without the last stage has no losses

"""torch's seven pipeline schedules give the losses, gradients and parameters of one process."""

import itertools
from collections.abc import Callable

import pytest
import torch
from small import FEATURES, Named, assert_same_named, batch, sgd, whole
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from ranks import ranks

MICROBATCHES = 8
STEPS = 2


def loop(rank: int, world_size: int) -> list[int]:
    """Two stages a rank, dealt round: rank 0 of 2 has 0 and 2."""
    return [rank, rank + world_size]


def vee(rank: int, world_size: int) -> list[int]:
    """Two stages a rank, down and up again: rank 0 of 2 has 0 and 3."""
    return [rank, 2 * world_size - 1 - rank]


def one(rank: int, world_size: int) -> list[int]:
    """One stage a rank."""
    return [rank]


Layout = Callable[[int, int], list[int]]
SCHEDULES: dict[str, tuple[type, Layout]] = {
    "GPipe": (ScheduleGPipe, one),
    "1F1B": (Schedule1F1B, one),
    "LoopedBFS": (ScheduleLoopedBFS, loop),
    "Interleaved1F1B": (ScheduleInterleaved1F1B, loop),
    "InterleavedZeroBubble": (ScheduleInterleavedZeroBubble, loop),
    "ZBVZeroBubble": (ScheduleZBVZeroBubble, vee),
    "DualPipeV": (ScheduleDualPipeV, vee),
}


def make_stage(index: int) -> nn.Module:
    """One stage of the chain, the same on every call; [N, FEATURES] -> [N, FEATURES], float64."""
    with torch.random.fork_rng():
        torch.manual_seed(index)
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()).double()


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def step_data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one step, [32, FEATURES] each."""
    return batch(step, size=32)[0], batch(step + 10, size=32)[0]


def run_stages(rank: int, world_size: int, name: str) -> tuple[Named, list[list[float]]]:
    """Train; return the gradients and parameters of this rank's stages, and the losses if it has the last one."""
    make_schedule, layout = SCHEDULES[name]
    indices = layout(rank, world_size)
    last = len(indices) * world_size - 1
    modules = {index: make_stage(index) for index in indices}
    stages = [PipelineStage(module, index, last + 1, torch.device("cpu")) for index, module in modules.items()]
    optimizer = sgd(itertools.chain(*(module.parameters() for module in modules.values())))
    schedule = make_schedule(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=squared_error)
    all_losses = []
    for step in range(STEPS):
        inputs, targets = step_data(step)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(
            *([inputs] if 0 in indices else []),
            **({"target": targets, "losses": losses} if last in indices else {}),
        )
        optimizer.step()
        all_losses.append([loss.item() for loss in losses])
    values = {}
    for index, module in modules.items():
        for parameter_name, parameter in module.named_parameters():
            values[f"{index}.{parameter_name}"] = whole(parameter)
            values[f"{index}.{parameter_name}.grad"] = whole(parameter.grad)
    return values, all_losses if last in indices else []


def run_alone(stages: int) -> tuple[Named, list[list[float]]]:
    """Train the whole chain in one process."""
    model = nn.Sequential(*(make_stage(index) for index in range(stages)))
    optimizer = sgd(model.parameters())
    all_losses = []
    for step in range(STEPS):
        inputs, targets = step_data(step)
        optimizer.zero_grad()
        parts = zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
        losses = [squared_error(model(x), y) for x, y in parts]
        (sum(losses) / MICROBATCHES).backward()
        optimizer.step()
        all_losses.append([loss.item() for loss in losses])
    values = {name: whole(p) for name, p in model.named_parameters()}
    return values | {f"{name}.grad": whole(p.grad) for name, p in model.named_parameters()}, all_losses


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule(name: str, world_size: int) -> None:
    results = ranks(world_size).run(run_stages, name)
    stages = sum(len(SCHEDULES[name][1](rank, world_size)) for rank in range(world_size))
    expected, expected_losses = run_alone(stages)
    assert_same_named({key: value for values, _ in results for key, value in values.items()}, expected)
    (losses,) = [losses for _, losses in results if losses]
    torch.testing.assert_close(losses, expected_losses, rtol=1e-10, atol=0)

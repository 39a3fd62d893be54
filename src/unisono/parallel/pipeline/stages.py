"""A model's layers divided into stages, by cost, by name, over devices; torch's pipelining cuts a traced graph by name.

    stages = stages_from_layers(layers, schedule)       # this rank's, so that the slowest stage is as fast as it can be

    parts = split_model(resnet, before=["layer3"])       # seq1 ... layer2 | layer3 ... fc
    model = ModelParallel(parts, ["cuda:0", "cuda:1"])   # one process: call it, backward, optimizer, as ever
    split = distribute_parts(parts, F.cross_entropy)     # two ranks: each holds, runs and updates its own part
    loss = split.step(images, labels)

With one batch in flight only one device works at a time; a `Pipeline` keeps them all busy. torch.profiler shows each
part's forward (`split part 0 forward (cuda:0)`), and each crossing of a border in both directions; the backward of a
part lies between two crossings. On ranks the ranges are those of a pipeline, `pipeline 0F0` and so on.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from unisono.algorithms.pipelines import gpipe
from unisono.errors import UsageError
from unisono.parallel.pipeline.runtime import Pipeline
from unisono.parallel.pipeline.shapes import Loss
from unisono.parallel.shards import Group, apply, place
from unisono.schedule.pipeline import PipelineSchedule

__all__ = ["ModelParallel", "distribute_parts", "divide_layers", "split_model", "stages_from_layers"]


def divide_layers(costs: int | Sequence[float], num_stages: int) -> list[range]:
    """Which layers each stage gets: contiguous ranges that cover all layers, each with one layer at least.

    costs: what each layer costs, in any unit, or how many equal layers there are. Of all divisions the one whose
    costliest stage costs least is taken, earlier stages getting more where there is a choice (dynamic programming,
    layers² × stages steps). Raises UsageError if there are more stages than layers, or a cost is below zero.
    """
    each = [1.0] * costs if isinstance(costs, int) else list(costs)
    count = len(each)
    if num_stages < 1 or num_stages > count:
        raise UsageError(f"{count} layers cannot make {num_stages} stages of a layer or more: use 1 to {count} stages")
    if any(not 0 <= cost < float("inf") for cost in each):
        raise UsageError(f"the cost of a layer must not be below zero, got {each}")
    total = [0.0, *accumulate(each)]

    @cache
    def cut(begin: int, stages: int) -> tuple[float, int]:
        """The cost of the costliest of so many stages from layer `begin` on, and the end of the first, negated."""
        if stages == 1:
            return total[count] - total[begin], -count
        ends = range(begin + 1, count - stages + 2)
        return min((max(total[end] - total[begin], cut(end, stages - 1)[0]), -end) for end in ends)

    found, begin = [], 0
    for stages in range(num_stages, 0, -1):
        end = -cut(begin, stages)[1]
        found.append(range(begin, end))
        begin = end
    return found


def stages_from_layers(
    layers: Sequence[nn.Module],
    schedule: PipelineSchedule,
    *,
    group: Group = None,
    costs: Sequence[float] | None = None,
) -> list[nn.Sequential]:
    """This rank's stages of a model that is a sequence of layers, cut by `divide_layers` (costs: of each layer).

    Raises UsageError, the same on every rank, if the schedule has more stages than the model has layers.
    """
    parts = divide_layers(len(layers) if costs is None else costs, schedule.num_stages)
    rank = place(group).rank
    return [nn.Sequential(*(layers[i] for i in parts[stage])) for stage in schedule.stages_of(rank)]


def split_model(model: nn.Module, before: Sequence[str]) -> list[nn.Sequential]:
    """Parts of a model that calls its children one after the other; each of the children named begins a new part.

    The parts share the model's modules and keep their names. Raises UsageError for a name that is no child, and for
    names that are not in the order of the children or begin with the first.
    """
    names = [name for name, _ in model.named_children()]
    unknown = [name for name in before if name not in names]
    if unknown:
        raise UsageError(f"the model has no child {unknown[0]!r}: it has {', '.join(names) or 'none'}")
    starts = [0, *(names.index(name) for name in before), len(names)]
    if any(start >= end for start, end in pairwise(starts)):
        raise UsageError(f"cuts before {', '.join(before)} leave a part empty: the children are {', '.join(names)}")
    parts = []
    for start, end in pairwise(starts):
        part = nn.Sequential()
        for name in names[start:end]:
            part.add_module(name, model.get_submodule(name))
        parts.append(part)
    return parts


class ModelParallel(nn.Module):
    """One model in one process, a part on each device: [rows, ...] on any device → output on the last part's.

    Moves the parts there. Backward and optimizers work as on one device: gradients cross the borders back, and each
    weight is updated where it lies. Devices may repeat. Raises UsageError unless there is a device for each part.
    """

    def __init__(self, parts: Sequence[nn.Module], devices: Sequence[torch.device | str]) -> None:
        super().__init__()
        if len(parts) != len(devices) or not parts:
            raise UsageError(f"{len(parts)} parts need a device each, got {len(devices)} devices")
        self.devices = [torch.device(device) for device in devices]
        self.parts = nn.ModuleList(part.to(device) for part, device in zip(parts, self.devices, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        """Run the parts one after the other, moving to each one's device what it is given."""
        for number, (part, device) in enumerate(zip(self.parts, self.devices, strict=True)):
            x = x.to(device) if number == 0 else apply(_Border, x, device, number)
            with record_function(f"split part {number} forward ({device})"):
                x = part(x)
        return x


class _Border(torch.autograd.Function):
    """From one part to the next: the same values on the other device; gradients go back to the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: torch.device, number: int) -> Tensor:
        ctx.device, ctx.number = x.device, number
        with record_function(f"split border {number - 1} to {number} ({device})"):
            return x.view_as(x) if x.device == device else x.to(device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with record_function(f"split border {ctx.number} to {ctx.number - 1} ({ctx.device})"):
            return gradient.to(ctx.device), None, None


def distribute_parts(
    parts: Sequence[nn.Module], loss_fn: Loss, *, group: Group = None, device: torch.device | str = "cpu"
) -> Pipeline:
    """One part per rank: rank r holds parts[r] on `device`, and `step(inputs, targets)` does forward and backward.

    The batch goes through whole: a pipeline of one microbatch, whose loss is the mean over it that loss_fn makes. Each
    rank then updates its own part with an optimizer over `parts[rank].parameters()`. Raises UsageError on every rank
    unless there is a part for each.
    """
    rank, world_size = place(group)
    if len(parts) != world_size:
        raise UsageError(f"{len(parts)} parts do not fit a group of {world_size} ranks: one for each")
    return Pipeline([parts[rank].to(device)], gpipe(world_size, 1), loss_fn, group=group, device=device)

"""Runs any proved schedule with uneven microbatches, tied weights and errors on all ranks; torch's pipelines have none.

    schedule = build_pipeline("1f1b", world_size=4, num_microbatches=8)
    pipeline = Pipeline([my_stage], schedule, F.cross_entropy)
    loss = pipeline.step(inputs, targets)    # on every rank; gradients are now in the parameters' .grad

The loss and all gradients are those of one process on the whole batch. Before the first step, and whenever shapes
change, all ranks agree on the shapes; what any of them refuses is an error on all, before anything has moved.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.errors import MismatchError, UsageError
from unisono.parallel.agreement import gather_objects, raise_on_all_ranks
from unisono.parallel.pipeline.messages import Channels, PipelineMessages
from unisono.parallel.pipeline.shapes import Infer, Loss, ShapeInference, meta_forward
from unisono.parallel.pipeline.step import Clock, PipelineStep
from unisono.parallel.pipeline.tied import TiedWeight
from unisono.parallel.shards import Group, place
from unisono.schedule.pipeline import PipelineSchedule
from unisono.simulation import PipelineReport
from unisono.verification import verify

__all__ = ["Pipeline"]


class Pipeline:
    """A model whose stages are spread over the ranks of a group, trained by a schedule.

    stages: this rank's stages, in rising order (`schedule.stages_of(rank)`), on `device`. Each takes one tensor, whose
    first dim is the microbatch's rows, and returns one; the last one's output goes to loss_fn(output, target), which
    returns one number. reduction: "mean" if that number is a mean over `count(target)` items (by default its rows),
    "sum" if it is a sum; the step's loss is then the mean or sum over the whole batch, however uneven the microbatches.
    Of a microbatch that counts 0, where others do not, loss_fn is not asked.
    tied: weights that several stages share, each as in `TiedWeight`. infer: what a stage returns for an input without
    data, for stages that `meta_forward` does not suit.

    Making one is collective. Raises UsageError on every rank if any has a wrong number of stages or another reduction,
    or if the group does not have the schedule's world_size, MismatchError if schedules differ, ScheduleError if the
    schedule is wrong.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        schedule: PipelineSchedule,
        loss_fn: Loss,
        *,
        group: Group = None,
        device: torch.device | str = "cpu",
        reduction: Literal["mean", "sum"] = "mean",
        count: Callable[[Tensor], float] = len,
        tied: Sequence[Mapping[int, str]] = (),
        infer: Infer = meta_forward,
    ) -> None:
        self.schedule, self.loss_fn, self.group, self.device = schedule, loss_fn, group, torch.device(device)
        self.reduction, self.count = reduction, count
        self.rank = place(group).rank
        self._check_alike(stages)
        self.stages = dict(zip(schedule.stages_of(self.rank), stages, strict=True))
        self._tied = [TiedWeight(names, self.stages, schedule, group) for names in tied]
        self._shapes = ShapeInference(self.stages, schedule, loss_fn, infer, group)
        self._channels = Channels(schedule, group, self.device, separate=self.device.type != "cpu")
        self._clock: Clock | None = None

    def step(self, inputs: Tensor | None = None, targets: Tensor | None = None) -> Tensor | None:
        """Forward and backward of one batch; gradients are added to `.grad`. Collective.

        The rank of stage 0 needs inputs, that of the last stage targets; others may pass None, or the same batch. Rows
        are cut into microbatches by `torch.tensor_split`: the first ones are a row longer if they do not divide.
        Returns the loss, a detached scalar, on the rank of the last stage; None on others. Raises UsageError on every
        rank for shapes that a stage refuses, before anything is computed, and where gradients are switched off.
        """
        if not torch.is_grad_enabled():
            raise UsageError("a step without gradients: take it outside of torch.no_grad(), or call evaluate")
        step = self._prepare(inputs, targets)
        for weight in self._tied:
            weight.begin()
        step.run(self.schedule.actions[self.rank])
        for weight in self._tied:
            weight.finish()
        self._clock = step.clock
        return torch.stack(step.losses).sum() if step.losses else None

    def evaluate(self, inputs: Tensor | None = None, targets: Tensor | None = None) -> Tensor | None:
        """The loss without gradients: the schedule's forwards alone. Collective. Modules keep their training mode."""
        with torch.no_grad():
            step = self._prepare(inputs, targets, forward_only=True)
            step.run(action for action in self.schedule.actions[self.rank] if action.kind == "F")
        return torch.stack(step.losses).sum() if step.losses else None

    def report(self) -> PipelineReport:
        """The timeline of the last `step`, next to the prediction. Collective. Raises UsageError before it.

        Start times of ranks on different hosts do not compare; how long each is busy and idle does.
        """
        raise_on_all_ranks(None if self._clock else "nothing to report before the first step", self.group)
        assert self._clock is not None
        return PipelineReport.of(self.schedule, gather_objects(self._clock.slots(), self.group))

    def _prepare(self, inputs: Tensor | None, targets: Tensor | None, forward_only: bool = False) -> PipelineStep:
        """Agree on shapes, cut the batch, post the first receives."""
        shapes = self._shapes.agree(inputs, targets, self.device)
        microbatches = self.schedule.num_microbatches
        first, last = 0 in self.stages, self.schedule.num_stages - 1 in self.stages
        sources = inputs.detach().to(self.device).tensor_split(microbatches) if first and inputs is not None else ()
        wanted = targets.to(self.device).tensor_split(microbatches) if last and targets is not None else ()
        weights = [1.0] * len(wanted)
        if self.reduction == "mean":
            counts = [float(self.count(part)) for part in wanted]
            total = sum(counts)
            weights = [value / total for value in counts] if total else weights
        messages = PipelineMessages(self.schedule, self.rank, shapes, self._channels, self.device, forward_only)
        clock = Clock(self.device)
        return PipelineStep(self.stages, messages, shapes, clock, self.loss_fn, sources, wanted, weights)

    def _check_alike(self, stages: Sequence[nn.Module]) -> None:
        """All ranks must have the same schedule, a right one, and their own stages of it."""
        schedules = gather_objects(str(self.schedule), self.group)
        heads = [text.splitlines()[0] for text in schedules]
        if len(set(schedules)) > 1:
            texts = ", ".join(
                f"rank {r}: {head}" for r, head in zip(dist.get_process_group_ranks(self.group), heads, strict=True)
            )
            raise MismatchError(f"the ranks of a pipeline have different schedules: {texts}; build one for all")
        verify(self.schedule).raise_if_bad()
        wanted, mismatch = self.schedule.stages_of(self.rank), None
        if len(schedules) != self.schedule.world_size:
            mismatch = f"a schedule for {self.schedule.world_size} ranks does not fit a group of {len(schedules)}"
        elif self.reduction not in ("mean", "sum"):
            mismatch = f'reduction = {self.reduction!r}: must be "mean" or "sum"'
        elif len(stages) != len(wanted):
            mismatch = f"{len(stages)} stages given, but {self.schedule.name} puts {len(wanted)} here: {list(wanted)}"
        raise_on_all_ranks(mismatch, self.group)

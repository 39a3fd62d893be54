"""One step of a pipeline on one rank: the only loop that computes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from unisono.errors import UsageError
from unisono.parallel.pipeline_backward import WeightGradients, input_gradient
from unisono.parallel.pipeline_clock import Clock
from unisono.parallel.pipeline_mail import Letter, PipelineMail
from unisono.parallel.pipeline_shapes import Form, Loss, Shapes
from unisono.schedule.pipeline import Action

__all__ = ["PipelineStep"]

_Key = tuple[int, int]  # stage, microbatch


class PipelineStep:
    """What the actions of one step share.

    weights: what the loss of each microbatch counts in that of the batch. Every action is a range of its own in
    torch.profiler's traces: `pipeline 2F0`.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        mail: PipelineMail,
        shapes: Shapes,
        clock: Clock,
        loss_fn: Loss,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        weights: Sequence[float],
    ) -> None:
        self.clock, self.losses = clock, list[Tensor]()
        self._stages, self._mail, self._shapes, self._loss_fn = stages, mail, shapes, loss_fn
        self._inputs, self._targets, self._weights = inputs, targets, weights
        self._last = len(shapes.entering) - 1
        self._done: dict[_Key, tuple[Tensor, Tensor]] = {}  # input and output, from F to B
        self._later: dict[_Key, WeightGradients] = {}  # from B to W

    def run(self, actions: Iterable[Action]) -> None:
        """Do the actions in order: wait for what one needs, do it, send what came out, and go on without waiting."""
        for action in actions:
            stage, kind, microbatch = action
            if kind == "W":
                with self._timed(action):
                    self._later.pop((stage, microbatch)).accumulate()
                continue
            arrived = self._mail.take(action.parts[0])
            with self._timed(action):
                result = self._forward(action, arrived) if kind == "F" else self._backward(action, arrived)
            if result is not None:
                to = Letter(stage + 1, "F", microbatch) if kind == "F" else Letter(stage - 1, "B", microbatch)
                self._mail.send(to, result)
        self._mail.finish()

    def _forward(self, action: Action, arrived: Tensor | None) -> Tensor | None:
        """What goes to the next stage; None from the last one, whose output becomes the loss."""
        stage, _, microbatch = action
        source = self._inputs[microbatch] if arrived is None else arrived
        if arrived is not None and torch.is_grad_enabled() and self._shapes.has_gradient(stage):
            source.requires_grad_()
        output: Tensor = self._stages[stage](source)
        if stage < self._last:
            self._check_form(action, output)
        else:
            output = self._part_of_loss(output, microbatch)
            self.losses.append(output.detach())
        if torch.is_grad_enabled():
            self._done[stage, microbatch] = source, output
        return output.detach() if stage < self._last else None

    def _backward(self, action: Action, arrived: Tensor | None) -> Tensor | None:
        """What goes to the stage before; None if that has no use for it."""
        stage, kind, microbatch = action
        source, output = self._done.pop((stage, microbatch))
        if kind == "B":
            found, self._later[stage, microbatch] = input_gradient(output, arrived, source)
        else:
            if output.requires_grad:
                torch.autograd.backward(output, arrived)
            found = source.grad
        if not self._shapes.has_gradient(stage):
            return None
        return torch.zeros_like(source) if found is None else found

    def _part_of_loss(self, output: Tensor, microbatch: int) -> Tensor:
        """Of a microbatch without anything to count the mean would be NaN: it adds zero, and zero gradients."""
        weight = self._weights[microbatch]
        return self._loss_fn(output, self._targets[microbatch]) * weight if weight else output.mul(0.0).sum()

    def _check_form(self, action: Action, output: Tensor) -> None:
        """What leaves a stage must be what the next rank has made room for."""
        form = self._shapes.entering[action.stage + 1][action.microbatch]
        if Form.of(output) != form:
            raise UsageError(
                f"stage {action.stage} returned {Form.of(output)} for microbatch {action.microbatch}, but its forward "
                f"without data gave {form}: pass `infer` to say what it returns"
            )

    @contextmanager
    def _timed(self, action: Action) -> Iterator[None]:
        start = self.clock.now()
        with record_function(f"pipeline {action}"):
            yield
        self.clock.note(action, start)

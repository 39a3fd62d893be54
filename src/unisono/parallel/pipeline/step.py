"""One step of a pipeline on one rank, timed: torch runs others' schedules by a private class, and times none."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from unisono.errors import UsageError
from unisono.parallel.pipeline.backward import WeightGradients, input_gradient
from unisono.parallel.pipeline.messages import PipelineMessages
from unisono.parallel.pipeline.shapes import Form, Loss, Shapes
from unisono.schedule.pipeline import Action
from unisono.simulation import Slot

__all__ = ["Clock", "PipelineStep"]

_Key = tuple[int, int]  # stage, microbatch


class Clock:
    """Notes the start and the end of actions without making the device wait."""

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type in ("cpu", "meta")
        self._began = time.perf_counter()
        self._origin = self.now()
        self._noted: list[tuple[Action, Any, Any]] = []

    def now(self) -> Any:
        """This moment of the CPU, or of the device's stream."""
        if self._on_cpu:
            return time.perf_counter()
        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def note(self, action: Action, start: Any) -> None:
        """The action that started at a moment ends now."""
        self._noted.append((action, start, self.now()))

    def slots(self) -> list[Slot]:
        """The recorded times, in seconds. On an accelerator, waits for the last action to end."""
        if self._on_cpu:
            return [Slot(*noted) for noted in self._noted]
        if self._noted:
            self._noted[-1][2].synchronize()
        return [Slot(action, self._since(start), self._since(end)) for action, start, end in self._noted]

    def _since(self, event: Any) -> float:
        return self._began + float(self._origin.elapsed_time(event)) / 1e3


class PipelineStep:
    """The state shared by the actions of one step.

    weights: what the loss of each microbatch counts in that of the batch. Every action is a range of its own in
    torch.profiler's traces: `pipeline 2F0`.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        messages: PipelineMessages,
        shapes: Shapes,
        clock: Clock,
        loss_fn: Loss,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        weights: Sequence[float],
    ) -> None:
        self.clock, self.losses = clock, list[Tensor]()
        self._stages, self._messages, self._shapes, self._loss_fn = stages, messages, shapes, loss_fn
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
            arrived = self._messages.take(action.parts[0])
            with self._timed(action):
                result = self._forward(action, arrived) if kind == "F" else self._backward(action, arrived)
            if result is not None:
                to = Action(stage + 1, "F", microbatch) if kind == "F" else Action(stage - 1, "B", microbatch)
                self._messages.send(to, result)
        self._messages.finish()

    def _forward(self, action: Action, arrived: Tensor | None) -> Tensor | None:
        """The output for the next stage; None from the last one, whose output becomes the loss."""
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
        """The gradient for the stage before; None if that has no use for it."""
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
        """Checks that the output of a stage has the form that the next rank expects."""
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

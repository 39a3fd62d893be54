"""Shapes between stages, for microbatches of any sizes, agreed by all ranks; torch infers one for all, rank by rank.

Each step starts with one all_gather of 8 bytes per rank: a hash of what the rank was given. Only when that has not been
seen before do the stages, one after the other, run their forward on tensors without data (torch's meta device) and tell
all ranks what comes out. A stage that refuses its input is thus an error on every rank, with no gradient half done.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.errors import UsageError, first_line
from unisono.parallel.shards import Group, place
from unisono.schedule.pipeline import PipelineSchedule

__all__ = ["Form", "Infer", "Loss", "ShapeInference", "Shapes", "meta_forward"]

Infer = Callable[[nn.Module, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Form:
    """Shape and dtype of one microbatch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        """That of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def empty(self, device: torch.device | str) -> Tensor:
        """A tensor of this form whose values are anything."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class Shapes:
    """The form of every microbatch as it enters each stage: `entering[stage][microbatch]`."""

    entering: tuple[tuple[Form, ...], ...]

    def has_gradient(self, stage: int) -> bool:
        """True if what enters a stage has a gradient that goes back to the stage before."""
        dtype = self.entering[stage][0].dtype
        return stage > 0 and (dtype.is_floating_point or dtype.is_complex)


def meta_forward(module: nn.Module, source: Tensor) -> Tensor:
    """The form of a module's output for an input without data, by weights without data. Nothing is changed or computed.

    Modules that communicate, or keep tensors that are neither parameters nor buffers, need their own way to tell.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    state = {name: torch.empty_like(tensor, device="meta") for name, tensor in named}
    with torch.no_grad(), torch.device("meta"):
        return torch.func.functional_call(module, state, (source,))  # type: ignore[no-any-return]


class ShapeInference:
    """Agrees with the other ranks on the shapes of a step, and remembers what has been agreed."""

    def __init__(
        self, modules: Mapping[int, nn.Module], schedule: PipelineSchedule, loss: Loss, infer: Infer, group: Group
    ) -> None:
        self.modules, self.schedule, self.loss, self.infer, self.group = modules, schedule, loss, infer, group
        self._known: dict[tuple[int, ...], Shapes] = {}

    def agree(self, inputs: Tensor | None, targets: Tensor | None, device: torch.device) -> Shapes:
        """The shapes for these batches. Collective. Raises UsageError on every rank if any stage refuses."""
        given = [None if t is None else Form.of(t) for t in (inputs, targets)]
        digest = hashlib.sha256(repr(given).encode()).digest()
        mine = torch.tensor([int.from_bytes(digest[:7])], device=device)
        everyone = [torch.empty_like(mine) for _ in range(place(self.group).world_size)]
        dist.all_gather(everyone, mine, group=self.group)
        key = tuple(torch.cat(everyone).tolist())
        if key not in self._known:
            self._known[key] = self._ask_all(inputs, targets)
        return self._known[key]

    def _ask_all(self, inputs: Tensor | None, targets: Tensor | None) -> Shapes:
        """Stage by stage, from the input to the loss: its rank finds what comes out and tells all."""
        ranks = self.schedule.ranks
        entering = [self._from_rank(ranks[0], partial(_split_forms, inputs, self.schedule.num_microbatches))]
        for stage, rank in ranks.items():
            entering.append(self._from_rank(rank, partial(self._leaving, stage, entering[-1])))
        rows = sum(form.shape[0] for form in entering[0])
        self._from_rank(ranks[self.schedule.num_stages - 1], partial(self._check_loss, entering.pop(), targets, rows))
        return Shapes(tuple(entering))

    def _from_rank(self, rank: int, find: Callable[[], tuple[Form, ...]]) -> tuple[Form, ...]:
        """The result of `find` on one rank, broadcast to all; its UsageError is raised on all."""
        box: list[Any] = [None]
        if rank == place(self.group).rank:
            try:
                box = [find()]
            except UsageError as problem:
                box = [str(problem)]
        dist.broadcast_object_list(box, group=self.group, group_src=rank)
        if isinstance(box[0], str):
            who = dist.get_process_group_ranks(self.group)[rank]
            raise UsageError(f"rank {who}: {box[0]}; nothing has been computed or sent")
        forms: tuple[Form, ...] = box[0]
        return forms

    def _leaving(self, stage: int, forms: tuple[Form, ...]) -> tuple[Form, ...]:
        found: dict[Form, Form] = {}
        for form in forms:
            if form not in found:
                try:
                    output = self.infer(self.modules[stage], form.empty("meta"))
                except Exception as problem:
                    raise UsageError(f"stage {stage} refuses its input, {form}: {first_line(problem)}") from problem
                if not isinstance(output, Tensor):
                    raise UsageError(f"stage {stage} must return one tensor, not {type(output).__name__}")
                found[form] = Form.of(output)
        return tuple(found[form] for form in forms)

    def _check_loss(self, forms: tuple[Form, ...], targets: Tensor | None, rows: int) -> tuple[Form, ...]:
        if targets is None:
            raise UsageError("the rank of the last stage needs targets")
        if targets.dim() == 0 or targets.shape[0] != rows:
            raise UsageError(f"targets of shape {list(targets.shape)} do not fit an input of {rows} rows")
        targets_forms = _split_forms(targets, len(forms))
        for form, target in dict.fromkeys(zip(forms, targets_forms, strict=True)):
            try:
                value = self.loss(form.empty("meta"), target.empty("meta"))
            except NotImplementedError:
                break  # the loss looks at values, which there are none of here
            except Exception as problem:
                raise UsageError(f"the loss refuses {form} with {target}: {first_line(problem)}") from problem
            if not isinstance(value, Tensor) or value.dim() > 0:
                raise UsageError(f"the loss must return a tensor of one number, not {_describe(value)}")
        return targets_forms


def _split_forms(batch: Tensor | None, num_microbatches: int) -> tuple[Form, ...]:
    if batch is None:
        raise UsageError("the rank of the first stage needs inputs")
    if batch.dim() == 0 or batch.shape[0] < num_microbatches:
        raise UsageError(f"a batch of shape {list(batch.shape)} does not make {num_microbatches} microbatches of a row")
    return tuple(Form.of(part) for part in batch.tensor_split(num_microbatches))


def _describe(value: object) -> str:
    return str(Form.of(value)) if isinstance(value, Tensor) else type(value).__name__

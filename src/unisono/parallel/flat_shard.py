"""Shards: the flat weights of some parameters, cut in equal parts over the ranks.

    bucket of 10 weights on 4 ranks, padded to 12
    [ a a a | a b b | b b c | c . . ]
      rank 0  rank 1  rank 2  rank 3

Parameters are views of the flat tensor, which every rank holds in full; `mine` is this rank's part of the same memory,
a Parameter that an ordinary elementwise optimizer updates. Gradients are summed straight into that part.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from unisono.parallel.averaging import Average
from unisono.parallel.buckets import check_dense, flattened, shaped
from unisono.torch_names import all_gather_single

__all__ = ["FlatShard", "is_per_weight"]

_ONE_PER_PARAMETER = {"step", "mu_product", "eta", "mu"}  # what torch's optimizers keep beside one number per weight


def is_per_weight(name: str, value: Any) -> bool:
    """Whether an optimizer's state of this name has one number per weight, and is cut as weights are."""
    return isinstance(value, Tensor) and name not in _ONE_PER_PARAMETER


class FlatShard:
    """One bucket of parameters; `slots` are their indices, `numel` counts their weights, without the padding."""

    def __init__(self, slots: Sequence[int], parameters: Sequence[Parameter], group: dist.ProcessGroup | None) -> None:
        self.slots = tuple(slots)
        self.group = group
        self.parameters = {slot: parameters[slot] for slot in slots}
        self.sizes = [parameters[slot].numel() for slot in slots]
        self.numel = sum(self.sizes)
        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.length = -(-self.numel // world_size)
        self.begin = rank * self.length
        sample = parameters[slots[0]]
        self.flat = torch.zeros(self.length * world_size, dtype=sample.dtype, device=sample.device)
        for slot, piece in self.pieces(self.flat).items():
            parameter = parameters[slot]
            piece.copy_(flattened(parameter.detach(), parameter))
            parameter.data = shaped(piece, parameter)
        self.mine = Parameter(self.flat[self.begin : self.begin + self.length])
        self.gradients: Tensor | None = None
        self.average: Average | None = None

    def pieces(self, flat: Tensor) -> dict[int, Tensor]:
        """The part of each slot in a flat tensor of `numel` elements or more."""
        parts = torch.split(flat[: self.numel], self.sizes)
        return dict(zip(self.slots, parts, strict=True))

    @torch.no_grad()
    def take(self, slot: int) -> None:
        """Move a gradient into the flat one, which exists only while backward needs it."""
        if self.gradients is None:
            self.gradients = torch.zeros_like(self.flat)
        parameter = self.parameters[slot]
        if parameter.grad is not None:
            check_dense(parameter.grad)
            self.pieces(self.gradients)[slot].copy_(flattened(parameter.grad, parameter))
            parameter.grad = None

    def start(self, touched: AbstractSet[int]) -> None:
        """Start reduce_scatter of the mean."""
        assert self.gradients is not None
        self.average = Average(self.gradients, self.group, torch.empty_like(self.mine))

    def finish(self, present: float) -> None:
        """Wait, add this rank's part to what it has, let the full gradient go."""
        assert self.average is not None
        part = self.average.wait(present)
        self.mine.grad = part if self.mine.grad is None else self.mine.grad + part
        self.gradients = self.average = None

    @torch.no_grad()
    def copy_gradients(self) -> None:
        """Take this rank's part from the parameters' full gradients; None as zero."""
        part = torch.zeros_like(self.mine)
        offset = -self.begin
        for slot, size in zip(self.slots, self.sizes, strict=True):
            first, last = max(offset, 0), min(offset + size, self.length)
            parameter = self.parameters[slot]
            if first < last and parameter.grad is not None:
                check_dense(parameter.grad)
                part[first:last] = flattened(parameter.grad, parameter)[first - offset : last - offset]
            offset += size
        self.mine.grad = part

    def gather(self, part: Tensor, out: Tensor | None = None) -> Tensor:
        """All ranks' parts (length,) side by side: (length * world_size,)."""
        whole = part.new_empty(self.flat.shape) if out is None else out
        all_gather_single(whole, part, self.group)
        return whole

    def start_gathering_weights(self) -> Any:
        """Bring the updated parts of all ranks into every rank's parameters; returns the Work."""
        return all_gather_single(self.flat, self.mine.detach(), self.group, async_op=True)

    def whole_states(self, state: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """An optimizer's state of `mine` as one of every parameter, in the parameter's shape. Collective."""
        states: dict[int, dict[str, Any]] = {slot: {} for slot in self.slots}
        for name, value in state.items():
            if is_per_weight(name, value):
                for slot, piece in self.pieces(self.gather(value)).items():
                    states[slot][name] = shaped(piece, self.parameters[slot]).clone()
            else:
                for slot in self.slots:
                    states[slot][name] = value.clone() if isinstance(value, Tensor) else value
        return states

    def cut_states(self, states: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        """The reverse: this rank's part of the states of all parameters; a parameter without state has zeros."""
        held = {slot: states[slot] for slot in self.slots if states.get(slot)}
        mine: dict[str, Any] = {}
        for name, value in next(iter(held.values()), {}).items():
            if is_per_weight(name, value):
                whole = torch.zeros(self.flat.shape, dtype=value.dtype, device=self.flat.device)
                pieces = self.pieces(whole)
                for slot, state in held.items():
                    pieces[slot].copy_(flattened(state[name], self.parameters[slot]))
                mine[name] = whole[self.begin : self.begin + self.length].clone()
            else:
                mine[name] = value.clone() if isinstance(value, Tensor) else value
        return mine

    def as_dtensor(self, part: Tensor, mesh: DeviceMesh) -> DTensor:
        """This rank's part (length,) of a tensor (numel,) without the padding: a view."""
        here = max(0, min(self.length, self.numel - self.begin))
        cut = (Shard(0),)
        return DTensor.from_local(part[:here], mesh, cut, run_check=False, shape=torch.Size([self.numel]), stride=(1,))

    def from_dtensor(self, value: DTensor) -> Tensor:
        """The reverse, (length,), padded with zeros."""
        local = value.to_local()
        part = torch.zeros(self.mine.shape, dtype=local.dtype, device=local.device)
        part[: local.numel()] = local
        return part

"""Sharded training: each rank keeps optimizer states, gradients, or parameters too, for its own part of the weights.

    what is cut into world_size parts     bytes per weight (Adam, float32)     with
    nothing                               4 + 4 + 8                            DataParallel
    optimizer states          (ZeRO-1)    4 + 4 + 8/n                          DataParallel and ShardedOptimizer
    and gradients             (ZeRO-2)    4 + 4/n + 8/n                        ShardedOptimizer
    and parameters            (ZeRO-3)    4/n + 4/n + 8/n                      shard_parameters: torch's FSDP2

Rajbhandari et al. 2020, ZeRO. What travels per step is the same as for an all_reduce up to ZeRO-2: a reduce_scatter of
gradients during backward and an all_gather of weights after the update, half an all_reduce each.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from unisono.errors import UsageError
from unisono.parallel.agreement import check_structure
from unisono.parallel.backward import BackwardWatch
from unisono.parallel.buckets import plan_buckets
from unisono.parallel.clip import clip_grad_norm
from unisono.parallel.flat_shard import FlatShard, is_per_weight

__all__ = ["ShardedOptimizer", "shard_parameters"]

BUCKET_NBYTES = 25 << 20
NOT_ELEMENTWISE = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}

Groups = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


class ShardedOptimizer:
    """An elementwise optimizer of torch whose states, and gradients, are cut over the ranks of a group.

        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        loss_of(model(batch)).backward()    # gradients: reduced and scattered; each rank keeps its part, `grad` is None
        optimizer.step()                    # each rank updates its part, all gather the weights
        optimizer.zero_grad()

    Args:
        parameters: as for any torch optimizer, groups with their own options too; frozen ones are left alone.
        kind: the optimizer's class; every update must depend on one weight's numbers alone (Adam, SGD, Adagrad ...).
        group: default all ranks; weights are taken from its rank 0, and become views of flat tensors.
        shard_gradients: False leaves gradients whole, to be averaged by DataParallel (ZeRO-1).
        bucket_nbytes: weights that share one collective, about.
        defaults: the optimizer's own options.

    A parameter that no rank used counts as one with gradient zero. `optimizer` is the torch optimizer of this rank's
    parts, to give to learning rate schedulers. Raises UsageError for an optimizer that is not elementwise, without
    parameters or with one twice, MismatchError on every rank if the parameters differ in shape.

    """

    def __init__(
        self,
        parameters: Groups,
        kind: type[Optimizer],
        group: dist.ProcessGroup | None = None,
        *,
        shard_gradients: bool = True,
        bucket_nbytes: int = BUCKET_NBYTES,
        **defaults: Any,
    ) -> None:
        if NOT_ELEMENTWISE & {base.__name__ for base in kind.__mro__}:
            raise UsageError(
                f"{kind.__name__} looks at whole matrices, expected an elementwise optimizer such as AdamW"
            )
        groups = _as_groups(parameters)
        self.group = group
        self.parameters = [weight for options in groups for weight in options["params"]]
        check_structure([(str(slot), weight) for slot, weight in enumerate(self.parameters)], group)
        self._slots: list[list[int]] = []
        inner: list[dict[str, Any]] = []
        self.shards: list[FlatShard] = []
        for options in groups:
            begin = sum(map(len, self._slots))
            self._slots.append(list(range(begin, begin + len(options["params"]))))
            plan = plan_buckets(self.parameters, self._slots[-1][::-1], bucket_nbytes, bucket_nbytes)
            shards = [FlatShard(slots, self.parameters, group) for slots in plan]
            inner.append({**options, "params": [shard.mine for shard in shards]})
            self.shards += shards
        for shard in self.shards:
            dist.broadcast(shard.flat, group=group, group_src=0)
        self.optimizer = kind(inner, **defaults)
        self._watch: BackwardWatch | None = None
        if shard_gradients:
            in_backward = sorted(self.shards, key=lambda shard: -max(shard.slots))
            self._watch = BackwardWatch(self.parameters, in_backward, lambda order: None)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients on this rank; the next backward pass outside reduces the sum."""
        if self._watch is not None:
            self._watch.paused = True
        try:
            yield
        finally:
            if self._watch is not None:
                self._watch.paused = False

    def step(self) -> None:
        """Update this rank's part of the weights and gather those of the others. Collective."""
        if self._watch is None:
            for shard in self.shards:
                shard.copy_gradients()
        self.optimizer.step()
        for work in [shard.start_gathering_weights() for shard in self.shards]:
            work.wait()

    def zero_grad(self) -> None:
        """Forget all gradients, also what a backward pass that failed on all ranks has left."""
        if self._watch is not None:
            self._watch.abandon()
        for shard in self.shards:
            shard.gradients = None
        for parameter in self.parameters:
            parameter.grad = None
        self.optimizer.zero_grad()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale gradients to a global norm of at most `max_norm`; returns the norm before, float32 (). Collective."""
        if self._watch is None:
            return clip_grad_norm(self.parameters, max_norm)
        group = dist.group.WORLD if self.group is None else self.group
        return clip_grad_norm([shard.mine for shard in self.shards], max_norm, group)

    def close(self) -> None:
        """Take the hooks off the parameters."""
        if self._watch is not None:
            self._watch.close()

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict that `kind` would have in one process, whole on every rank. Collective."""
        states: dict[int, dict[str, Any]] = {}
        for shard in self.shards:
            states |= shard.whole_states(self.optimizer.state.get(shard.mine, {}))
        options = self.optimizer.state_dict()["param_groups"]
        groups = [{**option, "params": slots} for option, slots in zip(options, self._slots, strict=True)]
        return {"state": {slot: state for slot, state in sorted(states.items()) if state}, "param_groups": groups}

    def load_full_state_dict(self, full: dict[str, Any]) -> None:
        """Take this rank's part of a state dict of `kind` over the same parameters in one process.

        Steps are counted per bucket here: those of its first parameter with a state hold for all. Raises UsageError if
        the groups have other numbers of parameters.
        """
        numbers = [len(options["params"]) for options in full["param_groups"]]
        if numbers != [len(slots) for slots in self._slots]:
            raise UsageError(
                f"the state dict has groups of {numbers} parameters, expected {[len(slots) for slots in self._slots]}"
            )
        keys = [key for options in full["param_groups"] for key in options["params"]]
        states = {slot: full["state"].get(key, {}) for slot, key in enumerate(keys)}
        self._load([shard.cut_states(states) for shard in self.shards], full["param_groups"])

    def state_dict(self, allocate: bool = False) -> dict[str, Any]:
        """This rank's part as DTensors, for torch.distributed.checkpoint: loads on another number of ranks.

        `allocate`: have states before the first step too, as a place to load into.
        """
        if allocate:
            self._allocate()
        group: Any = dist.group.WORLD if self.group is None else self.group
        mesh = DeviceMesh.from_group(group, self.shards[0].flat.device.type)
        state: dict[str, dict[str, Any]] = {}
        for number, shard in enumerate(self.shards):
            held = self.optimizer.state.get(shard.mine, {})
            state[str(number)] = {
                name: shard.as_dtensor(value, mesh) if is_per_weight(name, value) else value
                for name, value in held.items()
            }
        options = self.optimizer.state_dict()["param_groups"]
        return {"state": state, "param_groups": options, "layout": [shard.sizes for shard in self.shards]}

    def load_state_dict(self, sharded: dict[str, Any]) -> None:
        """The reverse of `state_dict`. Raises UsageError if its buckets are other ones (parameters, bucket_nbytes)."""
        layout = [shard.sizes for shard in self.shards]
        if sharded["layout"] != layout:
            raise UsageError(
                f"the state dict has {len(sharded['layout'])} buckets of other parameters than the {len(layout)} here: "
                "use the same model and bucket_nbytes"
            )
        parts = [
            {
                name: shard.from_dtensor(value) if isinstance(value, DTensor) else value
                for name, value in sharded["state"].get(str(number), {}).items()
            }
            for number, shard in enumerate(self.shards)
        ]
        self._load(parts, sharded["param_groups"])

    def _load(self, parts: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        own = self.optimizer.state_dict()["param_groups"]
        options = [{**theirs, "params": ours["params"]} for theirs, ours in zip(groups, own, strict=True)]
        state = {number: part for number, part in enumerate(parts) if part}
        self.optimizer.load_state_dict({"state": state, "param_groups": options})

    @torch.no_grad()
    def _allocate(self) -> None:
        """Have the optimizer create its states: a step that leaves weights and gradients as they are."""
        if self.optimizer.state:
            return
        kept = [(shard.mine.detach().clone(), shard.mine.grad) for shard in self.shards]
        for shard in self.shards:
            shard.mine.grad = torch.zeros_like(shard.mine)
        self.optimizer.step()
        for shard, (weights, gradient) in zip(self.shards, kept, strict=True):
            shard.mine.copy_(weights)
            shard.mine.grad = gradient


def _as_groups(parameters: Groups) -> list[dict[str, Any]]:
    """Parameter groups as torch has them, with a list of trainable parameters each."""
    given: list[Any] = list(parameters)
    if not given or not isinstance(given[0], dict):
        given = [{"params": given}]
    groups = []
    for options in given:
        held = options["params"]
        held = [held] if isinstance(held, Tensor) else list(held)
        groups.append({**options, "params": [weight for weight in held if weight.requires_grad]})
    groups = [options for options in groups if options["params"]]
    if not groups:
        raise UsageError("no parameter takes a gradient: there is nothing to optimize")
    listed = [weight for options in groups for weight in options["params"]]
    if twice := len(listed) - len(set(listed)):
        raise UsageError(f"{twice} of {len(listed)} parameters are given twice: name a tied weight once")
    return groups


def shard_parameters(
    module: nn.Module, blocks: type[nn.Module] | tuple[type[nn.Module], ...] = (), mesh: DeviceMesh | None = None
) -> nn.Module:
    """Cut parameters, gradients and optimizer states over the ranks by torch's FSDP2, in place; returns the module.

    Every submodule of one of the classes `blocks` is gathered as a whole just before it computes and freed afterwards,
    what is left with the module itself. `mesh`: default all ranks, one axis. Build the optimizer afterwards: parameters
    are DTensors then. Raises UsageError if no submodule is of these classes.
    """
    found = [child for child in module.modules() if child is not module and isinstance(child, blocks)]
    if blocks and not found:
        raise UsageError(f"no submodule is a {blocks}: name the classes of the blocks that repeat")
    if mesh is None:  # torch's own default is a mesh of GPUs wherever there is one
        device = next((weight.device.type for weight in module.parameters()), "cpu")
        mesh = init_device_mesh(device, (dist.get_world_size(),))
    for child in reversed(found):
        fully_shard(child, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module

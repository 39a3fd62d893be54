"""Ranks as a mesh: which rank holds which part of a model and of a batch.

| axis | splits | ranks of one line of it talk |
| --- | --- | --- |
| pp | layers, into stages | once per microbatch and border, to their neighbours |
| dp | the rows of a batch | once per step: a sum of all gradients |
| sp | the positions of a sequence | in every layer: keys and values go round |
| tp | heads, hidden features, vocabulary | four times per layer, and wait for it |

The axes are in this order, tp last: ranks that talk most have neighbouring numbers, which launchers put on one host.
With dp2 tp2 pp2 rank 5 = 1·4 + 0·2 + 1 is in the second stage, has the first rows and the second half of the heads.
"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from unisono.errors import MismatchError, UsageError
from unisono.parallel.mesh_shape import AXES, MeshShape
from unisono.parallel.shards import place
from unisono.parallel.together import refuse_together

__all__ = ["TrainingMesh", "agree"]


class TrainingMesh:
    """A torch DeviceMesh over all ranks of the default group, with an axis for each kind of parallelism.

    Making one is collective. Raises UsageError on every rank, before any group is made, if the shape does not make up
    the number of ranks, MismatchError if ranks were given different ones.

    axes: those with more than one rank; `device_mesh` has no others. groups: for every axis the ranks that differ from
    this one in that axis alone (a group of one where the axis has one rank). places: this rank in each of them.
    """

    def __init__(self, shape: MeshShape, device_type: str = "cpu") -> None:
        agree(lambda: shape.check(dist.get_world_size()), f"the mesh {shape}")
        self.shape, self.axes = shape, shape.axes
        named = self.axes or ("dp",)
        sizes = tuple(getattr(shape, axis) for axis in named)
        self.device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=named)
        self.groups = {axis: self.device_mesh.get_group(axis) for axis in named}
        if len(named) < len(AXES):
            alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            self.groups = {axis: self.groups.get(axis, alone) for axis in AXES}
        self.places = {axis: place(group) for axis, group in self.groups.items()}

    def close(self) -> None:
        """Give up the groups, where a program goes on without the mesh. Every rank must call it.

        In one order on all ranks: NCCL's communicators wait for each other where they end.
        """
        for group in dict.fromkeys(self.groups.values()):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)

    def sum(self, tensor: Tensor, *axes: str) -> Tensor:
        """Sum a tensor in place over the ranks of some axes, one after the other; returns it. Collective."""
        for axis in axes:
            if axis in self.axes:
                dist.all_reduce(tensor, group=self.groups[axis])
        return tensor


def agree(check: Callable[[], None], told: str) -> None:
    """Run a check on every rank, and raise UsageError on all if it fails on one, or if they are told other things.

    Collective over the default group.
    """
    complaint = None
    try:
        check()
    except UsageError as problem:
        complaint = str(problem)
    refuse_together(complaint, None)
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, told)
    if len(set(everyone)) > 1:
        listed = ", ".join(f"rank {rank}: {words}" for rank, words in enumerate(everyone))
        raise MismatchError(f"the ranks were given different configurations, expected one for all: {listed}")

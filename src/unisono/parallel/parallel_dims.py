"""Ranks per axis of a mesh, checked against a model and a batch; torch's DeviceMesh has sizes alone. Imports no torch.

| axis | splits | ranks of one line of it talk |
| --- | --- | --- |
| pp | layers, into stages | once per microbatch and border, to their neighbours |
| dp | the rows of a batch | once per step: a sum of all gradients |
| sp | the positions of a sequence | in every layer: keys and values go round |
| tp | heads, hidden features, vocabulary | four times per layer, and wait for it |

The axes are in this order, tp last: ranks that talk most have neighbouring numbers, which launchers put on one host.
With dp2 tp2 pp2 rank 5 = 1·4 + 0·2 + 1 is in the second stage, has the first rows and the second half of the heads.
"""

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from unisono.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AXES", "ParallelDims"]

AXES = ("pp", "dp", "sp", "tp")


@dataclass(frozen=True)
class ParallelDims:
    """Ranks per axis: data, tensor, pipeline and sequence parallel. `str` leaves out axes of one: "dp2 tp2 pp2"."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    sp: int = 1

    @classmethod
    def of(cls, mesh: "DeviceMesh") -> "ParallelDims":
        """Those of a mesh with all four axes. Raises UsageError for another one."""
        if mesh.mesh_dim_names != AXES:
            raise UsageError(
                f"a mesh with axes {mesh.mesh_dim_names}, expected {AXES}: make it by ParallelDims.build_mesh"
            )
        return cls(**dict(zip(AXES, mesh.shape, strict=True)))

    def build_mesh(self, device_type: str = "cpu") -> "DeviceMesh":
        """torch's DeviceMesh over all ranks of the default group, with all of `AXES`, also those of one rank.

        Collective. Raises UsageError on every rank, before any group is made, unless the axes make up the number of
        ranks, MismatchError if the ranks were given different ones.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from unisono.parallel.agreement import require_agreement

        require_agreement(lambda: self.check(dist.get_world_size()), f"the mesh {self}")
        return init_device_mesh(device_type, self.sizes, mesh_dim_names=AXES)

    @property
    def world_size(self) -> int:
        """Ranks of the mesh."""
        return prod(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks per axis in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes with more than one rank, in the order of `AXES`."""
        return tuple(axis for axis in AXES if getattr(self, axis) > 1)

    @property
    def usual_microbatches(self) -> int:
        """Two per stage: the bubble of 1F1B is then below a third. One without a pipeline."""
        return 2 * self.pp if self.pp > 1 else 1

    def place(self, rank: int) -> dict[str, int]:
        """A rank's coordinate on every axis; the last of `AXES` counts fastest."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return {axis: found[axis] for axis in AXES}

    def check(self, world_size: int) -> None:
        """Raise UsageError unless the axes are 1 or more and make up `world_size`."""
        for axis in ("dp", "tp", "pp", "sp"):
            if getattr(self, axis) < 1:
                raise UsageError(f"the mesh has {axis} = {getattr(self, axis)}, expected 1 or more")
        if self.world_size != world_size:
            product = " · ".join(str(size) for size in (self.dp, self.tp, self.pp, self.sp))
            raise UsageError(
                f"a mesh of dp · tp · pp · sp = {product} has {self.world_size} ranks, not {world_size}: "
                "the product must be the number of ranks"
            )

    def check_model(self, *, layers: int, heads: int, context: int, vocabulary: int, stages_per_rank: int = 1) -> None:
        """Raise UsageError for a transformer that this mesh cannot split."""
        stages = self.pp * stages_per_rank
        if stages > layers:
            raise UsageError(f"{stages} stages for {layers} layers: each stage needs one at least; use a smaller pp")
        if heads % self.tp:
            raise UsageError(f"{heads} attention heads do not divide by tp = {self.tp}: use a tp that divides them")
        if vocabulary < self.tp:
            raise UsageError(
                f"a vocabulary of {vocabulary} cannot be split over tp = {self.tp} ranks: use a smaller tp"
            )
        if context < 2 * self.sp:
            raise UsageError(
                f"a context of {context} positions makes no {2 * self.sp} pieces, two for each of sp = {self.sp}: "
                "use a longer context or a smaller sp"
            )

    def check_batch(self, batch: int, microbatches: int) -> None:
        """Raise UsageError for a batch that does not give every microbatch of every dp rank a row."""
        if microbatches < 1:
            raise UsageError(f"{microbatches} microbatches, expected 1 or more")
        if batch < self.dp * microbatches:
            raise UsageError(
                f"a batch of {batch} sequences does not fill {microbatches} microbatches on each of dp = {self.dp} "
                f"ranks: use {self.dp * microbatches} or more, or fewer microbatches"
            )

    def __str__(self) -> str:
        named = [f"{axis}{size}" for axis in ("dp", "tp", "pp", "sp") if (size := getattr(self, axis)) != 1]
        return " ".join(named) or "dp1"

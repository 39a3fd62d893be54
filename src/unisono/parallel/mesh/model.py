"""One transformer over dp × tp × pp × sp ranks, equal to one process; torch has the parts and no model made of them.

    mesh = ParallelDims(dp=2, tp=2, pp=2).build_mesh()
    model = MeshTransformer(Transformer(width=96, layers=4, heads=4, context=96), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for windows in batches:                    # the whole batch, the same on every rank
        loss = model.step(windows)             # the same on every rank
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

The parts are those of the other modules: a pipeline along pp of stages whose layers are split along tp, ring attention
along sp, and at the end of each step a sum of all gradients along sp and dp.
"""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from unisono.algorithms.pipelines import build_pipeline, usual_stages_per_rank
from unisono.errors import UsageError
from unisono.parallel.agreement import gather_objects, require_agreement
from unisono.parallel.mesh.gradients import (
    ParameterPart,
    clip_gradients,
    gradients_apart,
    parts_of,
    sum_gradients_over,
    sum_over,
)
from unisono.parallel.mesh.stage import TransformerStage
from unisono.parallel.mesh.transformer import Transformer
from unisono.parallel.parallel_dims import AXES, ParallelDims
from unisono.parallel.pipeline import Pipeline
from unisono.parallel.pipeline.stages import divide_layers
from unisono.parallel.sequence.layout import sequence_positions
from unisono.parallel.shards import own_part, place, split_evenly
from unisono.parallel.tensor.cross_entropy import parallel_cross_entropy
from unisono.parallel.tensor.state_dict import full_state_dict
from unisono.simulation import PipelineReport

__all__ = ["MeshTransformer"]

TIED = "embedding.weight"


class MeshTransformer:
    """This rank's share of a transformer, and the steps that all ranks take together.

    whole: equal on all ranks (draw it with one seed); its weights are copied. microbatches: of each dp rank's rows in a
    step; by default 2 · pp with a pipeline, else 1. schedule: one of `unisono list pipeline`.

    Making one is collective. Raises UsageError on every rank, before anything is cut or sent, if there are more stages
    than layers, if heads do not divide by tp, or if the context is too short for sp; MismatchError if the ranks' models
    or options differ in shape.
    """

    def __init__(
        self,
        whole: Transformer,
        mesh: DeviceMesh,
        *,
        schedule: str = "1f1b",
        microbatches: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.mesh, self.dims = mesh, ParallelDims.of(mesh)
        self.groups = {axis: mesh.get_group(axis) for axis in AXES}
        self.places = {axis: place(group) for axis, group in self.groups.items()}
        self.context, self.vocabulary = whole.context, whole.vocabulary
        self.microbatches = self.dims.usual_microbatches if microbatches is None else microbatches
        self._check(whole, schedule)
        plan = build_pipeline(schedule, self.dims.pp, self.microbatches)
        parts = divide_layers(len(whole.blocks), plan.num_stages)
        self.layers = [parts[stage] for stage in plan.stages_of(self.places["pp"].rank)]
        self.stages = [TransformerStage(whole, layers, mesh).to(device) for layers in self.layers]
        self.device, self._share = torch.device(device), 1.0
        last = plan.num_stages - 1
        self.pipeline = Pipeline(
            self.stages,
            plan,
            self._loss,
            group=self.groups["pp"],
            device=device,
            reduction="sum",
            tied=[{0: TIED, last: TIED}] if last else [],
            infer=_infer,
        )

    def _check(self, whole: Transformer, schedule: str) -> None:
        """Refuse on every rank what any of them finds wrong."""
        sizes = {name: getattr(whole, name) for name in ("heads", "context", "vocabulary")}

        def check() -> None:
            v = usual_stages_per_rank(schedule)
            self.dims.check_model(layers=len(whole.blocks), stages_per_rank=v, **sizes)
            self.dims.check_batch(self.dims.dp * self.microbatches, self.microbatches)

        require_agreement(
            check,
            f"{schedule}, {self.microbatches} microbatches, {sizes}, {len(whole.blocks)} layers of width {whole.width}",
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for its optimizer."""
        return chain.from_iterable(stage.parameters() for stage in self.stages)

    def parts(self) -> list[ParameterPart]:
        """This rank's parameters with their names in the whole model; a rank with both ends has the tied one twice."""
        return [part for stage in self.stages for part in parts_of(stage, copies=() if stage.is_first else (TIED,))]

    def step(self, windows: Tensor) -> Tensor:
        """Forward and backward of one batch: (sequences, context + 1) tokens, the same on every rank. Collective.

        Gradients are added to `.grad`. Returns the mean loss over all positions of the batch in nats per token, a
        detached float32 scalar, the same on every rank. Raises UsageError for a batch that does not fit the mesh.
        """
        parameters = list(self.parameters())
        with gradients_apart(parameters):
            loss = self.pipeline.step(*self._own(windows))
            sum_gradients_over(parameters, self.mesh, "sp", "dp")
        return self._total(loss)

    def evaluate(self, windows: Tensor) -> Tensor:
        """The loss of a batch as `step` returns it, without gradients. Collective."""
        return self._total(self.pipeline.evaluate(*self._own(windows)))

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the norm of the whole model's is at most max_norm; returns the norm before.

        Collective. Raises UsageError if max_norm is not positive.
        """
        return clip_gradients(self.parts(), self.mesh, max_norm)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The weights of the whole model under their names there: copies, on every rank. Collective."""
        mine: dict[str, Tensor] = {}
        for stage in self.stages:
            mine |= full_state_dict(stage)
        everyone = gather_objects(mine, self.groups["pp"])
        return {name: weight for part in everyone for name, weight in part.items()}

    def report(self) -> PipelineReport:
        """The bubble of the last step of this rank's pipeline, measured and predicted. Collective over pp."""
        return self.pipeline.report()

    def _own(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's rows and positions of a batch: what goes in and what shall come out."""
        if windows.dim() != 2 or windows.shape[1] != self.context + 1:
            raise UsageError(
                f"windows of shape {list(windows.shape)}, expected [sequences, {self.context + 1}]: the context of "
                f"{self.context} and the token after it"
            )
        dims, (rank, world_size) = self.dims, self.places["dp"]
        dims.check_batch(len(windows), self.microbatches)
        self._share = 1 / (len(windows) * self.context)
        rows = own_part(windows, 0, split_evenly(len(windows), world_size), rank).long().to(self.device)
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if dims.sp > 1:
            mine = sequence_positions(self.context, self.groups["sp"]).to(self.device)
            inputs, targets = inputs[:, mine], targets[:, mine]
        return inputs.contiguous(), targets.contiguous()

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The part of the batch's mean that one microbatch makes."""
        if logits.is_meta:  # asked for its form alone
            return logits.new_empty(())
        group = self.groups["tp"]
        return self._share * parallel_cross_entropy(logits, targets, self.vocabulary, group=group, reduction="sum")

    def _total(self, loss: Tensor | None) -> Tensor:
        """Every rank's part put together; along tp all have the same."""
        mine = torch.zeros((), device=self.device) if loss is None else loss.float()
        return sum_over(mine, self.mesh, "sp", "dp", "pp")


def _infer(stage: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(stage, TransformerStage)
    return stage.infer(x)

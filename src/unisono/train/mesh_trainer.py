"""One rank's part in training on a mesh, and what is told about it afterwards.

What counts as communication: the time that this rank's thread is in calls and in waits for them, along each axis. That
includes waiting for slower ranks, and along pp for the microbatches of other stages.
"""

from contextlib import ExitStack
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from unisono.parallel.agreement import gather_objects
from unisono.parallel.mesh import ActivationMeter, CommunicationMeter, MeshTransformer, memory_use
from unisono.parallel.sequence import sequence_positions
from unisono.parallel.shards import own_part, split_evenly
from unisono.train.settings import AxisTraffic, MeshReport, MeshSettings, RankShare, Settings
from unisono.train.trainer import ByteTransformer, Trainer
from unisono.units import show_spans

__all__ = ["MeshTrainer"]


class MeshTrainer(Trainer):
    """This rank's part of the model, on the mesh that the settings name."""

    def __init__(self, settings: Settings, mesh_settings: MeshSettings) -> None:
        self.settings = settings
        self.dims, mesh = mesh_settings.shape, mesh_settings.shape.build_mesh(settings.device)
        whole = ByteTransformer(settings.shape)
        self.num_parameters = sum(weight.numel() for weight in whole.parameters())
        self.model = MeshTransformer(
            whole,
            mesh,
            schedule=mesh_settings.schedule,
            microbatches=mesh_settings.num_microbatches,
            device=settings.device,
        )
        self.optimizer = self.make_optimizer(self.model.parameters())
        self.meter = CommunicationMeter(mesh)
        self.steps = self.activations = 0
        self.bubbles: list[tuple[float, float]] = []

    def step(self, windows: Tensor) -> tuple[float, float]:
        """Every rank has the mean of all. The first step is the one whose activations are counted."""
        before = self.meter.seconds
        with ExitStack() as meters:
            meters.enter_context(self.meter)
            activations = None if self.steps else meters.enter_context(ActivationMeter(self.model.parameters()))
            loss = self.model.step(windows).item()
            self.model.clip_grad_norm_(self.max_norm)
        self.activations = activations.peak if activations else self.activations
        self.steps += 1
        return loss / self.settings.ranks, self.meter.seconds - before

    def evaluate(self, windows: Tensor) -> float:
        """An equal part of all."""
        return self.model.evaluate(windows).item() * len(windows) * self.settings.shape.context / self.settings.ranks

    def whole_model(self) -> ByteTransformer:
        """Put together from the shares of all ranks."""
        whole = ByteTransformer(self.settings.shape)
        whole.load_state_dict(self.model.full_state_dict())
        return whole

    def observe(self) -> None:
        """Note the bubble."""
        if self.dims.pp > 1:
            report = self.model.report()
            self.bubbles.append((report.measured.bubble, report.predicted.bubble))

    def report(self) -> MeshReport:
        """All ranks' shares."""
        bubble = tuple(median(column) for column in zip(*self.bubbles, strict=True))
        everyone = gather_objects((self._share(), self.meter.traffic, bubble))
        shares, traffic, bubbles = zip(*everyone, strict=True)
        return MeshReport(
            list(shares),
            {axis: self._average([of_rank[axis] for of_rank in traffic]) for axis in self.dims.axes},
            None if not bubble else (fmean(b[0] for b in bubbles), fmean(b[1] for b in bubbles)),
        )

    def _average(self, traffic: list[Any]) -> AxisTraffic:
        return AxisTraffic(
            *(fmean(getattr(t, n) for t in traffic) / self.steps for n in ("calls", "nbytes", "seconds"))
        )

    def _share(self) -> RankShare:
        model, dims, places = self.settings.shape, self.dims, self.model.places
        use = memory_use(self.model.parameters(), self.optimizer, self.activations)

        spans = partial(show_spans, least=2)

        def own(total: int, axis: str) -> str:
            parts = split_evenly(total, getattr(dims, axis))
            return spans(own_part(torch.arange(total), 0, parts, places[axis].rank).tolist())

        positions = sequence_positions(model.context, self.model.groups["sp"])
        return RankShare(
            place={axis: places[axis].rank for axis in self.dims.axes},
            layers=spans(layer for layers in self.model.layers for layer in layers),
            heads=own(model.heads, "tp"),
            sequences=own(self.settings.batch, "dp"),
            positions=spans(positions.tolist()),
            parameters=sum(weight.numel() for weight in self.model.parameters()),
            state_nbytes=use.total - use.activations,
            activation_nbytes=use.activations,
        )

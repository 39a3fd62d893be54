"""Settings and results of the job: plain values that travel between processes. Never imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from unisono.algorithms.pipelines import usual_stages_per_rank
from unisono.errors import UsageError, check_known
from unisono.launch import MOST_RANKS
from unisono.parallel.parallel_dims import ParallelDims

__all__ = [
    "BACKENDS",
    "VOCABULARY",
    "AxisTraffic",
    "MeshReport",
    "MeshSettings",
    "ModelShape",
    "Outcome",
    "RankShare",
    "Settings",
    "StepRecord",
]

BACKENDS = {"cpu": ("unisono", "gloo"), "cuda": ("unisono", "nccl")}
"""By device: cuda is a GPU for each rank."""
VOCABULARY = 256


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the transformer: features, blocks, attention heads, and bytes it can look back on."""

    width: int = 96
    layers: int = 3
    heads: int = 4
    context: int = 96

    def check(self) -> None:
        """Raise UsageError for sizes that make no transformer."""
        for name in ("width", "layers", "heads", "context"):
            _at_least_one(name, getattr(self, name))
        if self.width % (2 * self.heads):
            raise UsageError(f"--width is {self.width}, expected a multiple of {2 * self.heads} ({self.heads} heads)")


@dataclass(frozen=True)
class MeshSettings:
    """The split of model and batch: ranks per axis, the pipeline's schedule, microbatches of each dp rank in a step."""

    shape: ParallelDims
    schedule: str = "1f1b"
    microbatches: int | None = None

    @property
    def num_microbatches(self) -> int:
        """As told, or the usual number."""
        return self.shape.usual_microbatches if self.microbatches is None else self.microbatches

    def check(self, ranks: int, batch: int, model: ModelShape) -> None:
        """Raise UsageError for what this mesh cannot split."""
        self.shape.check(ranks)
        self.shape.check_model(
            layers=model.layers,
            heads=model.heads,
            context=model.context,
            vocabulary=VOCABULARY,
            stages_per_rank=usual_stages_per_rank(self.schedule),
        )
        self.shape.check_batch(batch, self.num_microbatches)


@dataclass(frozen=True)
class Settings:
    """One training run. Every rank holds equal settings; `batch` counts the sequences of all ranks together.

    mesh: None to train by DDP. device: of the model, one of `BACKENDS`.
    """

    backend: str = "unisono"
    ranks: int = 4
    text: Path | None = None
    steps: int = 240
    batch: int = 16
    learning_rate: float = 6e-3
    seed: int = 0
    sample_bytes: int = 160
    shape: ModelShape = field(default_factory=ModelShape)
    mesh: MeshSettings | None = None
    device: str = "cpu"

    def check(self) -> None:
        """Raise UsageError, one line, for the first value that cannot be trained with."""
        check_known("--device", self.device, BACKENDS)
        check_known("backend", self.backend, BACKENDS[self.device])
        if self.mesh is not None:
            self.mesh.shape.check(self.ranks)
        _at_least_one("ranks", self.ranks)
        if self.ranks > MOST_RANKS:
            raise UsageError(f"--ranks is {self.ranks}, expected at most {MOST_RANKS} processes of this host")
        _at_least_one("steps", self.steps)
        _at_least_one("batch", self.batch)
        if self.mesh is None and self.batch < self.ranks:
            raise UsageError(
                f"--batch is {self.batch} for {self.ranks} ranks, but every rank needs at least one sequence: "
                f"use --batch {self.ranks} or more"
            )
        if not 0 < self.learning_rate < float("inf"):
            raise UsageError(f"--learning-rate is {self.learning_rate}, expected a positive number")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed is {self.seed}, expected 0 to 2**63 - 1")
        self.shape.check()
        if self.mesh is not None:
            self.mesh.check(self.ranks, self.batch, self.shape)

    @property
    def tokens_per_step(self) -> int:
        """Bytes predicted in one step by all ranks together."""
        return self.batch * self.shape.context


@dataclass(frozen=True)
class StepRecord:
    """One training step, averaged over the ranks: loss in nats per byte, times in seconds."""

    step: int
    loss: float
    seconds: float
    sync_seconds: float


@dataclass(frozen=True)
class RankShare:
    """One rank's part of model and batch.

    place: its coordinate on each axis with more than one rank. layers to positions: numbers as `show_spans` has them.
    parameters: how many. state_nbytes: of weights, gradients and optimizer. activation_nbytes: the most that backward
    waits for at any moment of a step.
    """

    place: Mapping[str, int]
    layers: str
    heads: str
    sequences: str
    positions: str
    parameters: int
    state_nbytes: int
    activation_nbytes: int


@dataclass(frozen=True)
class AxisTraffic:
    """Along one axis, per rank and step, averaged: calls, bytes of the rank's tensors, seconds of its thread."""

    calls: float
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class MeshReport:
    """The shares by rank; the traffic of each axis; the pipeline's bubble, measured and predicted (0 to 1).

    `bubble` is None without a pipeline: the median over some steps, averaged over the pipelines.
    """

    shares: list[RankShare]
    traffic: Mapping[str, AxisTraffic]
    bubble: tuple[float, float] | None


@dataclass(frozen=True)
class Outcome:
    """The result of one run. `held_out` holds (steps done, loss in nats per byte) from before the first step on."""

    settings: Settings
    text_name: str
    parameters: int
    unigram_entropy: float
    records: list[StepRecord]
    held_out: list[tuple[int, float]]
    sample: bytes
    mesh: MeshReport | None = None

    @property
    def step_seconds(self) -> float:
        """Median seconds of a step."""
        return median(record.seconds for record in self.records)

    @property
    def tokens_per_second(self) -> float:
        """Bytes predicted per second of all ranks together, at the median step."""
        return self.settings.tokens_per_step / self.step_seconds

    @property
    def sync_share(self) -> float:
        """Share of the training time that a rank spends in communication, 0 to 1."""
        return sum(record.sync_seconds for record in self.records) / sum(record.seconds for record in self.records)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"--{name} is {value}, expected 1 or more")

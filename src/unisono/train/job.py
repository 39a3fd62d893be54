"""One rank's share of the job: the text in batches, the learning rate, the records; a trainer does the rest.

The loss is summed up over the ranks between steps, outside the timed part.
"""

import math
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

import unisono  # noqa: F401  (registers the backend where torch does not load its entry points)
from unisono.train.mesh_trainer import MeshTrainer
from unisono.train.settings import Outcome, Settings, StepRecord
from unisono.train.text import load_corpus
from unisono.train.trainer import DDPTrainer, Trainer
from unisono.transport.process import pin

__all__ = ["rank_main", "run_rank"]

REPORT_EVERY = 5
HELD_OUT_ROUNDS = 8
HELD_OUT_WINDOWS = 64
WARM_UP_SHARE = 0.1
TEMPERATURE = 0.6
PROMPT = b"The "

Listener = Callable[[list[StepRecord]], None]


def run_rank(settings: Settings, rank: int, init_method: str, on_steps: Listener) -> Outcome:
    """Train on this process as one rank of `settings.ranks`, in a default group of its own, on cores of its own.

    On GPUs its GPU is the one of its local rank. The cores are its share of the host's, where ranks do not outnumber
    them. An affinity that was set before stays, and so does every rank's with UNISONO_PIN=0 in the environment.

    Args:
        settings: equal on all ranks.
        rank: this process.
        init_method: where the ranks meet, as in `init_process_group`.
        on_steps: called every few steps with their records, on every rank with the same values.

    Returns:
        The outcome; records and held-out losses are equal on all ranks, only rank 0 has a sample.

    Raises:
        UsageError: settings or text cannot be trained with.
        Any error of the backend: the group is then left as it is, for the process is expected to end.

    """
    settings.check()
    _pin(rank, settings.ranks)
    torch.set_num_threads(1)
    if settings.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    dist.init_process_group(settings.backend, init_method=init_method, rank=rank, world_size=settings.ranks)
    outcome = _Job(settings, rank).run(on_steps)
    dist.destroy_process_group()
    return outcome


def rank_main(rank: int, pipe: Connection, init_method: str, settings: Settings) -> None:
    """A rank that `launch` has started: rank 0 sends the records as they come, and the outcome."""
    outcome = run_rank(settings, rank, init_method, (lambda records: None) if rank else pipe.send)
    if not rank:
        pipe.send(outcome)


class _Job:
    """Trainer and text of one rank."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings = settings
        self.rank = rank
        self.corpus = load_corpus(settings.text, settings.shape.context)
        self.training = _as_tensor(self.corpus.training)
        self.held_out = _as_tensor(self.corpus.held_out)
        torch.manual_seed(settings.seed)
        mesh = settings.mesh
        self.trainer: Trainer = DDPTrainer(settings, rank) if mesh is None else MeshTrainer(settings, mesh)

    def run(self, on_steps: Listener) -> Outcome:
        """Train for all steps; every rank does the same number of them."""
        records: list[StepRecord] = []
        pending: list[tuple[float, float, float]] = []
        held_out = [(0, self._held_out_loss())]
        judged_after = {round(self.settings.steps * part / HELD_OUT_ROUNDS) for part in range(1, HELD_OUT_ROUNDS + 1)}
        for step, windows in enumerate(self._batches(), start=1):
            pending.append(self._step(step, windows))
            if len(pending) == REPORT_EVERY or step == self.settings.steps:
                fresh = self._average(pending, first=len(records) + 1)
                records += fresh
                pending.clear()
                self.trainer.observe()
                on_steps(fresh)
            if step in judged_after:
                held_out.append((step, self._held_out_loss()))
        return Outcome(
            settings=self.settings,
            text_name=self.corpus.name,
            parameters=self.trainer.num_parameters,
            unigram_entropy=self.corpus.unigram_entropy(),
            records=records,
            held_out=held_out,
            sample=self._sample(),
            mesh=self.trainer.report(),
        )

    def _batches(self) -> Iterator[Tensor]:
        """The windows of every step, (sequences, context + 1) bytes.

        All ranks draw the same from the seed, and each learns from its part of them, so the training data of a step do
        not depend on the number of ranks.
        """
        generator = torch.Generator().manual_seed(self.settings.seed)
        context = self.settings.shape.context
        offsets = torch.arange(context + 1)
        for _ in range(self.settings.steps):
            starts = torch.randint(len(self.training) - context, (self.settings.batch,), generator=generator)
            yield self.training[starts[:, None] + offsets]

    def _step(self, step: int, windows: Tensor) -> tuple[float, float, float]:
        """One optimizer step: (this rank's part of the loss, seconds, seconds of communication)."""
        begin = perf_counter()
        optimizer = self.trainer.optimizer
        for group in optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * _rate(step / self.settings.steps)
        loss, sync_seconds = self.trainer.step(windows)
        optimizer.step()
        optimizer.zero_grad()
        if self.settings.device == "cuda":
            torch.cuda.synchronize()
        return loss, perf_counter() - begin, sync_seconds

    def _average(self, pending: list[tuple[float, float, float]], first: int) -> list[StepRecord]:
        """Sum the parts of the loss and average the times of some steps over the ranks."""
        table = torch.tensor(pending, dtype=torch.float64, device=self.settings.device)
        table[:, 1:] /= self.settings.ranks
        dist.all_reduce(table)
        return [StepRecord(step, *row) for step, row in enumerate(table.tolist(), start=first)]

    def _held_out_loss(self) -> float:
        """Nats per byte on windows spread evenly over the held-out text: 64 of them, or as many as a batch has."""
        context, count = self.settings.shape.context, max(HELD_OUT_WINDOWS, self.settings.batch)
        starts = torch.linspace(0, len(self.held_out) - context - 1, count).long()
        windows = self.held_out[starts[:, None] + torch.arange(context + 1)]
        parts = torch.tensor_split(windows, count // self.settings.batch)
        total = torch.tensor(
            sum(self.trainer.evaluate(part) for part in parts), dtype=torch.float64, device=self.settings.device
        )
        dist.all_reduce(total)
        return total.item() / (count * context)

    def _sample(self) -> bytes:
        """On rank 0; putting the model together takes all ranks."""
        settings = self.settings
        if not settings.sample_bytes:
            return b""
        model = self.trainer.whole_model()
        return b"" if self.rank else PROMPT + model.generate(PROMPT, settings.sample_bytes, TEMPERATURE, settings.seed)


def _pin(rank: int, world_size: int) -> None:
    """Keep this rank to cores of its own on its host, if they suffice and nobody has said where it shall run."""
    if os.environ.get("UNISONO_PIN") != "0":
        pin(int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _rate(done: float) -> float:
    """Learning rate as a share of its peak: a short straight rise, then half a cosine down to a twentieth."""
    return min(1.0, done / WARM_UP_SHARE) * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)

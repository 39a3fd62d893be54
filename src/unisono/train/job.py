"""One rank's share of the job: torch's own DDP, unchanged, on the backend that the settings name.

What counts as communication. DDP calls a hook for every bucket of gradients that is ready; ours starts torch's own
all_reduce hook and times the call. After the last bucket nothing is left to compute, so the time from there to the end
of `backward` is spent waiting for gradients. Both together are the share of the step in which this rank's thread did
not compute: it includes waiting for slower ranks and leaves out what was hidden behind the backward pass. The loss is
summed up over the ranks between steps, outside the timed part.
"""

import math
from collections.abc import Callable, Iterator
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import unisono  # noqa: F401  (registers the backend where torch does not load its entry points)
from unisono.train.model import ByteTransformer
from unisono.train.settings import Outcome, Settings, StepRecord
from unisono.train.text import load_corpus

__all__ = ["run_rank"]

REPORT_EVERY = 5
HELD_OUT_ROUNDS = 8
HELD_OUT_WINDOWS = 64
WARM_UP_SHARE = 0.1
TEMPERATURE = 0.6
PROMPT = b"The "

Listener = Callable[[list[StepRecord]], None]


def run_rank(settings: Settings, rank: int, init_method: str, on_steps: Listener) -> Outcome:
    """Train on this process as one rank of `settings.ranks`, in a default group of its own.

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
    torch.set_num_threads(1)
    dist.init_process_group(settings.backend, init_method=init_method, rank=rank, world_size=settings.ranks)
    outcome = _Trainer(settings, rank).run(on_steps)
    dist.destroy_process_group()
    return outcome


class _SyncClock:
    """Measures the part of a backward pass that one rank spends issuing and awaiting gradient synchronisation."""

    def __init__(self) -> None:
        self.issuing = 0.0
        self.last_issued = 0.0

    def hook(self, group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """The communication hook for DDP: torch's own averaging all_reduce, timed."""
        begin = perf_counter()
        future = allreduce_hook(group, bucket)
        self.last_issued = perf_counter()
        self.issuing += self.last_issued - begin
        return future

    def backward(self, loss: Tensor) -> float:
        """Run the backward pass and return the seconds it spent on synchronisation."""
        self.issuing = 0.0
        loss.backward()  # type: ignore[no-untyped-call]
        return self.issuing + perf_counter() - self.last_issued


class _Trainer:
    """Model, optimizer and text of one rank."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings = settings
        self.rank = rank
        self.corpus = load_corpus(settings.text, settings.shape.context)
        self.training = _as_tensor(self.corpus.training)
        self.held_out = _as_tensor(self.corpus.held_out)
        torch.manual_seed(settings.seed)
        self.model = ByteTransformer(settings.shape)
        self.replicas = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.clock = _SyncClock()
        self.replicas.register_comm_hook(dist.group.WORLD, self.clock.hook)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.05
        )

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
                on_steps(fresh)
            if step in judged_after:
                held_out.append((step, self._held_out_loss()))
        return Outcome(
            settings=self.settings,
            text_name=self.corpus.name,
            parameters=sum(weight.numel() for weight in self.model.parameters()),
            unigram_entropy=self.corpus.unigram_entropy(),
            records=records,
            held_out=held_out,
            sample=self._sample(),
        )

    def _batches(self) -> Iterator[Tensor]:
        """This rank's windows of every step, (sequences, context + 1) bytes.

        All ranks draw the same positions of the whole batch from the seed and each takes every world_size-th of them,
        so the training data of a step do not depend on the number of ranks.
        """
        generator = torch.Generator().manual_seed(self.settings.seed)
        context = self.settings.shape.context
        offsets = torch.arange(context + 1)
        for _ in range(self.settings.steps):
            starts = torch.randint(len(self.training) - context, (self.settings.batch,), generator=generator)
            yield self.training[starts[self.rank :: self.settings.ranks, None] + offsets]

    def _step(self, step: int, windows: Tensor) -> tuple[float, float, float]:
        """One optimizer step: (this rank's part of the loss, seconds, seconds of synchronisation).

        DDP averages gradients over the ranks; each rank therefore weighs its sum by world_size / tokens of all, which
        gives the gradient of the mean over the whole batch also where ranks hold unequal numbers of sequences.
        """
        begin = perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * _rate(step / self.settings.steps)
        loss = _summed_loss(self.replicas, windows) / self.settings.tokens_per_step
        sync_seconds = self.clock.backward(loss * self.settings.ranks)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), perf_counter() - begin, sync_seconds

    def _average(self, pending: list[tuple[float, float, float]], first: int) -> list[StepRecord]:
        """Sum the parts of the loss and average the times of some steps over the ranks."""
        table = torch.tensor(pending, dtype=torch.float64)
        table[:, 1:] /= self.settings.ranks
        dist.all_reduce(table)
        return [StepRecord(step, *row) for step, row in enumerate(table.tolist(), start=first)]

    @torch.no_grad()
    def _held_out_loss(self) -> float:
        """Nats per byte on windows spread evenly over the held-out text, shared out over the ranks."""
        context = self.settings.shape.context
        starts = torch.linspace(0, len(self.held_out) - context - 1, HELD_OUT_WINDOWS).long()
        mine = starts[self.rank :: self.settings.ranks, None] + torch.arange(context + 1)
        total = torch.zeros((), dtype=torch.float64)
        for windows in torch.split(self.held_out[mine], self.settings.batch):
            total += _summed_loss(self.model, windows)
        dist.all_reduce(total)
        return total.item() / (HELD_OUT_WINDOWS * context)

    def _sample(self) -> bytes:
        if self.rank or not self.settings.sample_bytes:
            return b""
        return PROMPT + self.model.generate(PROMPT, self.settings.sample_bytes, TEMPERATURE, self.settings.seed)


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _summed_loss(model: torch.nn.Module, windows: Tensor) -> Tensor:
    """Nats summed over all positions of (sequences, context + 1) bytes."""
    tokens = windows.long()
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def _rate(done: float) -> float:
    """Learning rate as a share of its peak: a short straight rise, then half a cosine down to a twentieth."""
    return min(1.0, done / WARM_UP_SHARE) * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)

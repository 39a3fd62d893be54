"""The model of the job, and the two ways to train it: torch's own DDP here, a mesh in `mesh_trainer`.

What counts as communication. DDP calls a hook for every bucket of gradients that is ready; ours starts torch's own
all_reduce hook and times the call. After the last bucket nothing is left to compute, so the time from there to the end
of `backward` is spent waiting for gradients. Both together are the share of the step in which this rank's thread did
not compute: it includes waiting for slower ranks and leaves out what was hidden behind the backward pass. On GPUs it
is the share of the host's thread alone, which issues calls and does not wait for them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from unisono.parallel.mesh import Transformer
from unisono.train.settings import VOCABULARY, MeshReport, ModelShape, Settings

__all__ = ["ByteTransformer", "DDPTrainer", "Trainer"]


class ByteTransformer(Transformer):
    """Logits of the next byte at every position: (batch, time ≤ context) integers → (batch, time, 256).

    Weights are drawn from torch's default generator: seed it to have the same model on every rank.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape.width, shape.layers, shape.heads, shape.context, VOCABULARY)

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, temperature: float, seed: int) -> bytes:
        """The `length` bytes that follow a prompt of at least one byte, drawn at the given temperature."""
        generator, device = torch.Generator().manual_seed(seed), self.embedding.weight.device
        text = list(prompt)
        for _ in range(length):
            logits: Tensor = self(torch.tensor([text[-self.context :]], device=device))
            odds = torch.softmax(logits[0, -1].cpu() / temperature, dim=-1)
            text.append(int(torch.multinomial(odds, 1, generator=generator)))
        return bytes(text[len(prompt) :])


class Trainer(ABC):
    """One rank's share of the model, and its optimizer. All ranks call the same methods with the same batches."""

    settings: Settings
    optimizer: torch.optim.Optimizer
    num_parameters: int  # of the whole model
    max_norm = 1.0

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The one that the job trains with."""
        return torch.optim.AdamW(parameters, lr=self.settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.05)

    @abstractmethod
    def step(self, windows: Tensor) -> tuple[float, float]:
        """Forward, backward and clipping for a whole batch of (sequences, context + 1) bytes.

        Returns this rank's part of the batch's mean loss (the parts of all ranks add up to it, in nats per byte) and
        the seconds that its thread spent on communication.
        """

    @abstractmethod
    def evaluate(self, windows: Tensor) -> float:
        """This rank's part of the nats of a whole batch, summed over all its positions."""

    @abstractmethod
    def whole_model(self) -> ByteTransformer:
        """The model as it is now. Collective."""

    def observe(self) -> None:  # noqa: B027
        """Look at the last step, outside the time that is measured. Collective."""

    def report(self) -> MeshReport | None:
        """The holdings of each rank, if they differ. Collective."""
        return None


class DDPTrainer(Trainer):
    """The whole model on every rank, each of which takes every world_size-th sequence."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings, self.rank = settings, rank
        self.model = ByteTransformer(settings.shape).to(settings.device)
        self.num_parameters = sum(weight.numel() for weight in self.model.parameters())
        self.ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.clock = _SyncClock()
        self.ddp.register_comm_hook(dist.group.WORLD, self.clock.hook)
        self.optimizer = self.make_optimizer(self.model.parameters())

    def step(self, windows: Tensor) -> tuple[float, float]:
        """DDP averages gradients over the ranks; each therefore weighs its sum by world_size / tokens of all.

        That gives the gradient of the mean over the whole batch also where ranks hold unequal numbers of sequences.
        """
        loss = _summed_loss(self.ddp, self._own(windows)) / self.settings.tokens_per_step
        seconds = self.clock.backward(loss * self.settings.ranks)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        return loss.item(), seconds

    @torch.no_grad()
    def evaluate(self, windows: Tensor) -> float:
        """Of this rank's sequences."""
        return _summed_loss(self.model, self._own(windows)).item()

    def whole_model(self) -> ByteTransformer:
        """Here it is."""
        return self.model

    def _own(self, windows: Tensor) -> Tensor:
        return windows[self.rank :: self.settings.ranks].to(self.settings.device)


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


def _summed_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Nats summed over all positions of (sequences, context + 1) bytes."""
    tokens = windows.long()
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")

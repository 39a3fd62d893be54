"""What the job asks of a way to train: by replicas or on a mesh."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from unisono.train.model import ByteTransformer
from unisono.train.settings import Settings
from unisono.train.share import MeshReport

__all__ = ["Learner"]


class Learner(ABC):
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

    @abstractmethod
    def observe(self) -> None:
        """Look at the last step, outside the time that is measured. Collective."""

    @abstractmethod
    def report(self) -> MeshReport | None:
        """Who holds what, where ranks hold different things. Collective."""

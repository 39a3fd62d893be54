"""A job small enough for a test, and its text."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from unisono.train.job import _rate
from unisono.train.settings import ModelShape, Settings
from unisono.train.trainer import ByteTransformer

TEXT = b"the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 60
SHAPE = ModelShape(width=12, layers=2, heads=3, context=16)
SMALL = Settings(ranks=2, steps=7, batch=6, shape=SHAPE, sample_bytes=5)


def small(folder: Path, **changes: object) -> Settings:
    """The small job on a text file of its own."""
    text = folder / "text.txt"
    text.write_bytes(TEXT)
    return replace(SMALL, text=text, **changes)  # type: ignore[arg-type]


def one_process(settings: Settings) -> list[float]:
    """The same training without ranks, DDP or any code of the job: one model, the whole batch."""
    text = torch.tensor(list(TEXT[: int(len(TEXT) * 0.9)]))
    torch.manual_seed(settings.seed)
    model = ByteTransformer(settings.shape)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05)
    generator = torch.Generator().manual_seed(settings.seed)
    context = settings.shape.context
    losses = []
    for step in range(1, settings.steps + 1):
        starts = torch.randint(len(text) - context, (settings.batch,), generator=generator)
        windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()])
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = settings.learning_rate * _rate(step / settings.steps)
        optimizer.step()
    return losses

"""A job small enough for a test, and its text."""

from dataclasses import replace
from pathlib import Path

from unisono.train.settings import ModelShape, Settings

TEXT = b"the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 60
SHAPE = ModelShape(width=12, layers=2, heads=3, context=16)
SMALL = Settings(ranks=2, steps=7, batch=6, shape=SHAPE, sample_bytes=5)


def small(folder: Path, **changes: object) -> Settings:
    """The small job on a text file of its own."""
    text = folder / "text.txt"
    text.write_bytes(TEXT)
    return replace(SMALL, text=text, **changes)  # type: ignore[arg-type]

"""The text to learn from: bytes to train on, bytes held out, and how well plain byte frequencies would do."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unisono.errors import UsageError, file_errors

__all__ = ["Corpus", "load_corpus"]

MAX_BYTES = 64 * 2**20
HELD_OUT_SHARE = 0.1
WINDOWS_NEEDED = 4


@dataclass(frozen=True)
class Corpus:
    """A text in two parts: the model trains on the front and is judged on the end, which it never sees."""

    name: str
    training: bytes
    held_out: bytes

    def unigram_entropy(self) -> float:
        """Nats per held-out byte for a model that knows only how often each byte occurs in the training part.

        Add-one smoothing gives bytes that the training part lacks a finite price. A model that has learnt anything
        about the order of bytes stays below this.
        """
        seen = np.bincount(np.frombuffer(self.training, dtype=np.uint8), minlength=256) + 1.0
        asked = np.bincount(np.frombuffer(self.held_out, dtype=np.uint8), minlength=256)
        return float(-(asked * np.log(seen / seen.sum())).sum() / asked.sum())


def load_corpus(path: Path | None, context: int) -> Corpus:
    """Read a text and split it: the last tenth is held out.

    Args:
        path: a file, of which at most the first 64 MiB are used; None means the language reference inside Python.
        context: bytes the model looks back on; both parts must hold a few windows of that length.

    Raises:
        UsageError: the file is missing, unreadable, no regular file, or too small.

    """
    name, text = _python_reference() if path is None else (path.name, _read(path))
    needed = int(WINDOWS_NEEDED * (context + 1) / HELD_OUT_SHARE)
    if len(text) < needed:
        raise UsageError(
            f"the text {name} has {len(text):,} bytes, expected {needed:,} or more for a context of {context}"
        )
    cut = int(len(text) * (1 - HELD_OUT_SHARE))
    return Corpus(name, text[:cut], text[cut:])


def _read(path: Path) -> bytes:
    """The first bytes of a regular file; pipes and devices are refused, because they may never end."""
    if path.exists() and not path.is_file():
        raise UsageError(f"cannot read the text {path}: it is no regular file")
    with file_errors(f"read the text {path}"), path.open("rb") as file:
        return file.read(MAX_BYTES)


def _python_reference() -> tuple[str, bytes]:
    """The help texts that `help()` shows: the language reference of the running Python."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UsageError("this Python ships without its language reference (pydoc_data): pass --text FILE") from None
    return "Python's language reference", "\n".join(topics[key] for key in sorted(topics)).encode()

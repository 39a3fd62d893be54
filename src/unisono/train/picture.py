"""Pictures as files. Never imports torch."""

from pathlib import Path
from typing import TYPE_CHECKING

from unisono.errors import file_errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["save_figure"]


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a PNG; raises UsageError if the file cannot be written."""
    with file_errors(f"write {path}"):
        figure.savefig(path, format="png", dpi=120)

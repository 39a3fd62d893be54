"""`unisono train`: the main job, a small transformer trained with DDP on N local ranks."""

__all__ = ["train"]


def train() -> None:
    """Train a small byte-level transformer on N local ranks."""

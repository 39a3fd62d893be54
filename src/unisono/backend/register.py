"""Makes the name "unisono" known to torch.distributed."""

__all__ = ["autoload"]


def autoload() -> None:
    """Called by torch's backend autoload (entry point group ``torch.backends``)."""

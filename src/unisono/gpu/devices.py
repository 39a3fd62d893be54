"""The GPUs of this host, as commands need them: a rank has one of its own."""

import os

from unisono.errors import UsageError

__all__ = ["count_gpus", "describe_gpus"]


def count_gpus(ranks: int | None = None) -> int:
    """The number of ranks on GPUs: ``ranks``, or as many as this process sees GPUs.

    Raises UsageError if there is not one for each of them; under torchrun, for each of this host.
    """
    import torch

    found = torch.cuda.device_count()
    if not found:
        raise UsageError(f"--device cuda needs a GPU, but torch {torch.__version__} sees none on this host")
    needed = int(os.environ.get("LOCAL_WORLD_SIZE") or ranks or 1)
    if needed > found:
        raise UsageError(f"{needed} ranks need a GPU each, but this host has {found}: give --ranks {found}")
    return ranks or found


def describe_gpus(ranks: int) -> str:
    """In words: how many of which kind, and the versions that matter."""
    import torch

    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    name = torch.cuda.get_device_name(0)
    return f"{ranks} × {name}, CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, version))}"

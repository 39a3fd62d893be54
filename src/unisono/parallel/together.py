"""What one rank finds wrong, all ranks refuse: so that nobody is left waiting for a rank that raised."""

from typing import Any

import torch.distributed as dist

from unisono.errors import UsageError
from unisono.parallel.shards import Group

__all__ = ["refuse_together"]


def refuse_together(complaint: str | None, group: Group) -> None:
    """Raise UsageError with the complaints of all ranks, on every rank, if there are any. Collective."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, complaint, group)
    ranks: dict[str, list[int]] = {}
    for rank, words in zip(dist.get_process_group_ranks(group), gathered, strict=True):
        if words is not None:
            ranks.setdefault(words, []).append(rank)
    if ranks:
        told = (f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {words}" for words, who in ranks.items())
        raise UsageError("; ".join(told))

"""`sync`: an update within one world. The ranks in `src` are a sender, every other is a replica of its own."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from unisono.errors import UsageError
from unisono.weights.meeting import KEY
from unisono.weights.receiver import Receiver
from unisono.weights.rules import Rule
from unisono.weights.sender import Sender
from unisono.weights.sharding import Sharding
from unisono.weights.side import Side
from unisono.weights.update import Report

__all__ = ["sync"]


def sync(
    model: nn.Module | Mapping[str, Tensor],
    src: int | Sequence[int] = 0,
    *,
    group: Any = None,
    rules: Sequence[Rule] = (),
    shard: Sharding | None = None,
    bucket: int = 32 << 20,
    checksum: bool = True,
    version: int | None = None,
    timeout: float = 60.0,
) -> Report:
    """Gives all other ranks of a group the model of the ranks in `src`; returns a `Report`. Collective.

    model: a module, or a mapping of names to tensors. src: a global rank, or several over which the model is sharded or
    replicated. group: None: the default group. Every other rank is a replica named `rank N`. rules, shard, bucket,
    checksum, version: as for `Sender` and `plan`.

    Raises what `Sender.push` and `Receiver.pull` raise; all ranks then keep what they had.
    """
    side = Side(group)
    if side.alone:
        raise UsageError("sync needs a process group: call torch.distributed.init_process_group first")
    members = dist.get_process_group_ranks(group)
    ranks = _ranks_of(src, members)
    if len(ranks) == len(members):
        raise UsageError(f"src={src!r} are all ranks of the group: nobody is left to receive")
    senders, store = _Senders(group, ranks), HashStore()
    if dist.get_rank() not in ranks:
        met = senders.of_first(None, "Sender")
        if met is None:
            raise UsageError(f"rank {ranks[0]} could not begin to send: its own error says why")
        store.set(KEY, met[0])
        name = f"rank {dist.get_rank()}"
        with Receiver(store, model, shard=shard, name=name, group="self", timeout=timeout) as receiver:
            pulled: Report = receiver.pull()
            return pulled
    count = len(members) - len(ranks)
    try:
        sender = Sender(
            store, model, rules=rules, shard=shard, receivers=count, group=senders, bucket=bucket, checksum=checksum,
            timeout=timeout,
        )  # fmt: skip
    finally:
        senders.give_up()
    with sender:
        pushed: Report = sender.push(version)
        return pushed


def _ranks_of(src: Any, members: list[int]) -> list[int]:
    """The ranks of `src`, in order. Raises `UsageError` for what are no ranks of the group."""
    ranks = list(src) if isinstance(src, Iterable) else [src]
    known = all(isinstance(rank, int) and not isinstance(rank, bool) and rank in members for rank in ranks)
    if not ranks or not known or len(set(ranks)) < len(ranks):
        raise UsageError(f"src={src!r}: expected one or several of the global ranks {members}, each once")
    return sorted(ranks)


class _Senders(Side):
    """The ranks of `src`, which have no group of their own."""

    def __init__(self, group: Any, ranks: list[int]) -> None:
        super().__init__(group)
        self._first, self._given = ranks[0], False
        self.world_size = len(ranks)
        self.rank = ranks.index(dist.get_rank()) if dist.get_rank() in ranks else -1

    def of_first(self, value: Any, what: str) -> Any:
        """The value of the first of them, at all ranks of the group."""
        self._given = True
        found = [value]
        dist.broadcast_object_list(found, src=self._first, group=self._group)
        return found[0]

    def give_up(self) -> None:
        """The others must not wait, if the first has raised before it gave a value."""
        if not self._given:
            self.of_first(None, "Sender")

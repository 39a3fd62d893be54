"""A side: the ranks that make a `Sender` or a `Receiver` together, and what both are given."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from unisono.errors import UsageError
from unisono.weights.rules import Rule

__all__ = ["Side", "check_rules"]


class Side:
    """This process's rank on its side, and how many there are."""

    def __init__(self, group: Any = None) -> None:
        """``group``: None: the default group if there is one, else this process alone, as for ``"self"``.

        Raises `UsageError` for anything else that is no process group, or one that this process is not in.
        """
        self._group = None if isinstance(group, str) else group
        if isinstance(group, str) and group != "self":
            raise UsageError(f"group={group!r}: expected None, 'self' or a process group")
        self.alone = group == "self" or (group is None and not dist.is_initialized())
        self.rank, self.world_size = 0, 1
        if not self.alone:
            try:
                self.rank, self.world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
            except (ValueError, RuntimeError, AttributeError, TypeError) as error:
                raise UsageError(f"group={group!r} is no process group: {error}") from None
            if self.rank < 0:
                raise UsageError("this process is not in the group: pass one of which it is a member, or 'self'")

    def of_first(self, value: Any, what: str) -> Any:
        """The value of the side's rank 0; collective. ``what``: that all its ranks are making.

        Raises `UsageError` if rank 0 makes something else: both sides have taken the same group.
        """
        if self.world_size == 1:
            return value
        found = [what, value]
        first = dist.get_global_rank(self._group, 0) if self._group is not None else 0
        dist.broadcast_object_list(found, src=first, group=self._group)
        if found[0] != what:
            raise UsageError(
                f"rank 0 of this group makes a {found[0]}, this rank ({self.rank}) a {what}: all ranks of a group are "
                'one side; pass group="self", or a group of the ranks of each side'
            )
        return found[1]


def check_rules(rules: Any) -> tuple[Rule, ...]:
    """The rules as a tuple."""
    found = tuple(rules) if isinstance(rules, Iterable) and not isinstance(rules, str) else (rules,)
    if not isinstance(rules, Iterable) or not all(isinstance(rule, Rule) for rule in found):
        raise UsageError(f"rules={rules!r}: expected a list of rules, such as [rename('model.*', '*')]")
    return found

"""The other overloads of a process group's methods, turned into the one that torch.distributed's functions use.

torch's own groups have several of most: ``allreduce(tensor, op)`` beside ``allreduce([tensor], options)``. Tensors come
in lists, of one tensor per rank; other arguments by name or in torch's order.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from unisono.errors import UsageError

__all__ = [
    "all_gather",
    "all_reduce",
    "broadcast",
    "gather",
    "one",
    "options",
    "reduce",
    "reduce_scatter",
    "scatter",
    "timed",
    "with_options",
]

_OPTIONS = ("asyncOp", "reduceOp", "rootRank", "timeout")
Form = tuple[Any, ...]


def one(tensors: Any) -> list[torch.Tensor]:
    """The list of the one tensor of a rank; raises `UsageError` for more, or none."""
    found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if len(found) != 1:
        raise UsageError(f"{len(found)} tensors where a rank has one: make a call for each")
    return found


def _per_rank(tensors: Any) -> list[list[torch.Tensor]]:
    """The list of one list of tensors, one per rank; none where a rank gives, or takes, none."""
    if not isinstance(tensors, Sequence):
        raise UsageError(f"a {type(tensors).__name__} where a list of tensors is needed, one per rank")
    if not tensors or isinstance(tensors[0], torch.Tensor):
        return [list(tensors)] if tensors else []
    if len(tensors) > 1:
        raise UsageError(f"{len(tensors)} lists of tensors where a rank has one: make a call for each")
    return [list(tensors[0])]


def options(kind: Any, given: Any = None, root: Any = None, op: Any = None, timeout: timedelta | None = None) -> Any:
    """torch's options of a ``kind``: as ``given``, if such were, else from the other arguments."""
    made = kind()
    fields = {"rootRank": root, "reduceOp": op, "timeout": timeout}
    if isinstance(given, kind):
        fields = {name: getattr(given, name) for name in _OPTIONS if hasattr(given, name)}
    for name, value in fields.items():
        if value is not None:
            setattr(made, name, value)
    return made


def timed(kind: Any, given: Any, timeout: timedelta | None) -> Any:
    """`options` in whose place a timeout may be given."""
    return options(kind, given, timeout=given if isinstance(given, timedelta) else timeout)


def all_reduce(tensors: Any, opts: Any, op: Any, timeout: Any) -> Form:
    """``(tensor, op, timeout)``, or the same by name; a list of one for the tensor."""
    return one(tensors), options(AllreduceOptions, opts, op=opts if op is None else op, timeout=timeout)


def reduce(tensors: Any, opts: Any, op: Any, timeout: Any, root: Any) -> Form:
    """``(tensor, root, op, timeout)``."""
    return one(tensors), options(ReduceOptions, opts, opts if root is None else root, op, timeout)


def reduce_scatter(outputs: Any, inputs: Any, opts: Any, op: Any, timeout: Any) -> Form:
    """``(output, inputs, op, timeout)``."""
    op = opts if op is None else op
    return one(outputs), _per_rank(inputs) or [[]], options(ReduceScatterOptions, opts, op=op, timeout=timeout)


def broadcast(tensors: Any, opts: Any, timeout: Any, root: Any) -> Form:
    """``(tensor, root, timeout)``."""
    return one(tensors), options(BroadcastOptions, opts, opts if root is None else root, timeout=timeout)


def all_gather(outputs: Any, tensors: Any, opts: Any, timeout: Any) -> Form:
    """``(outputs, tensor, timeout)``."""
    return _per_rank(outputs) or [[]], one(tensors), timed(AllgatherOptions, opts, timeout)


def gather(outputs: Any, tensors: Any, opts: Any, timeout: Any, root: Any) -> Form:
    """``(outputs, tensor, root, timeout)``."""
    opts = options(GatherOptions, opts, opts if root is None else root, timeout=timeout)
    return _per_rank(outputs), one(tensors), opts


def scatter(outputs: Any, inputs: Any, opts: Any, timeout: Any, root: Any) -> Form:
    """``(output, inputs, root, timeout)``."""
    opts = options(ScatterOptions, opts, opts if root is None else root, timeout=timeout)
    return one(outputs), _per_rank(inputs), opts


_FORMS: dict[str, Any] = {
    "allreduce": all_reduce, "reduce": reduce, "reduce_scatter": reduce_scatter, "broadcast": broadcast,
    "allgather": all_gather, "gather": gather, "scatter": scatter,
}  # fmt: skip
_KINDS = {
    "allreduce_coalesced": AllreduceCoalescedOptions, "reduce_scatter_single": ReduceScatterOptions,
    "reduce_scatter_single_coalesced": ReduceScatterOptions, "all_gather_single": AllgatherOptions,
    "all_gather_single_coalesced": AllgatherOptions, "allgather_coalesced": AllgatherOptions,
    "alltoall": AllToAllOptions, "all_to_all_single": AllToAllOptions,
}  # fmt: skip


def with_options(name: str, given: dict[str, Any]) -> list[Any]:
    """The arguments of a method, ``given`` by name, as torch.distributed's functions give them: options last.

    Raises `UsageError` as `one`.
    """
    if name in _FORMS:
        return list(_FORMS[name](**given))
    timeout = given.pop("timeout", None)
    return (
        [*list(given.values())[:-1], timed(_KINDS[name], given["opts"], timeout)]
        if name in _KINDS
        else [*given.values()]
    )

"""Six functions of torch.distributed that exchange objects, for groups of unisono.

torch pickles before it asks any backend: the rank whose object fails raises, alone, and the others wait for it. Here
the objects are pickled first, and a failure travels in place of the object through the exchange that the others make
anyway; then all ranks raise the same error, and the group is in step. An object that can not be unpickled is an error
of the rank that receives it, once the exchange is over; it names both.
"""

import functools
import inspect
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from unisono.errors import UsageError, kind_and_text

__all__ = ["patch"]

_Function = Callable[..., Any]


class _Pickled:
    """An object of rank ``rank`` (global) that is pickled already: unpickling this gives the object itself."""

    def __init__(self, op: str, rank: int, what: str, data: bytes) -> None:
        self.op, self.rank, self.what, self.data = op, rank, what, data

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, int, str, bytes]]:
        return _unpickled, (self.op, self.rank, self.what, self.data)


def _unpickled(op: str, rank: int, what: str, data: bytes) -> Any:
    """The object; called as the last thing that a rank does for an exchange. Raises `UsageError`."""
    try:
        return pickle.loads(data)
    except Exception as error:
        raise UsageError(
            f"{op}: {what} of rank {rank} can not be unpickled on rank {dist.get_rank()}: {kind_and_text(error)}. "
            "The exchange is over, and the group can still be used"
        ) from error


_KINDS = (TypeError, AttributeError, pickle.PicklingError)
"""Errors of pickle; the error on every rank is one of these too, for programs that expect it."""


class _Failure:
    """Stands for an object that rank ``rank`` (global) could not pickle."""

    def __init__(self, rank: int, what: str, error: Exception) -> None:
        self.rank, self.what, self.text = rank, what, kind_and_text(error)
        self.kind = next((kind for kind in _KINDS if type(error) is kind), TypeError)


def _packed(op: str, objects: Sequence[Any]) -> list[Any]:
    """Each object pickled; if one can not be, its failure in place of every object."""
    rank, packed = dist.get_rank(), list[Any]()
    for k, thing in enumerate(objects):
        file, what = io.BytesIO(), "the object" if len(objects) == 1 else f"the object no. {k}"
        try:
            dist.distributed_c10d._pickler(file).dump(thing)
        except Exception as error:
            return [_Failure(rank, what, error)] * len(objects)
        packed.append(_Pickled(op, rank, what, file.getvalue()))
    return packed


def _refuse(op: str, found: Sequence[Any]) -> None:
    """Raises if there is a failure among the objects."""
    failures = dict.fromkeys((f.rank, f.what, f.text) for f in found if isinstance(f, _Failure))
    if failures:
        words = "; ".join(f"{what} of rank {rank} can not be pickled: {text}" for rank, what, text in failures)
        kind = next(f.kind for f in found if isinstance(f, _Failure))
        raised = type("UsageError", (UsageError, kind), {"__module__": UsageError.__module__})
        raise raised(f"{op}: {words}. No rank has received anything, and the group can still be used")


def _is_root(given: dict[str, Any]) -> bool:
    """True if this rank is the one that a call's ``src`` or ``group_src`` names; torch's own check follows.

    A rank is asked of the group itself, as torch does: a group whose members have no default group in common numbers
    them otherwise than theirs do.
    """
    group: Any = given.get("group") or dist.group.WORLD
    root = given.get("group_src")
    if root is None:
        try:
            root = dist.get_group_rank(group, given.get("src") or 0)
        except ValueError:  # not a member: torch says so
            return False
    return bool(group.rank() == root)


def _exchange(name: str, gives: str, takes: str, rooted: bool, original: _Function, asked: Any) -> Any:
    """Calls torch's ``original`` with what is in the argument ``gives`` pickled, then fills the list ``takes``."""
    named = asked.arguments
    user, given, single = named.get(takes), named.get(gives), gives == "obj"
    giving = gives in named and (single or given is not None) and (not rooted or _is_root(named))
    found = list(user) if user is not None else None
    if takes:
        named[takes] = found
    if giving:
        packed = _packed(name, [given] if single else given)
        named[gives] = packed[0] if single else packed
        if gives == takes or not takes:
            found = packed
    result = original(*asked.args, **asked.kwargs)
    if name == "scatter_object_list":
        found = (found or [])[:1]
    _refuse(name, found or [])
    if user is not None and not (giving and gives == takes):
        for k, thing in enumerate(found or []):  # item by item as torch does, for what serves as a list
            user[k] = thing
    return result


def _gather_object(original: _Function, asked: Any) -> None:
    """The objects go to one rank alone, so that whether all could be pickled is asked of all before."""
    named, group = asked.arguments, asked.arguments["group"]
    (named["obj"],) = _packed("gather_object", [named["obj"]])
    failed = isinstance(named["obj"], _Failure)
    flags = [torch.empty(1, dtype=torch.long, device="cpu") for _ in range(dist.get_world_size(group))]
    dist.all_gather(flags, torch.tensor([failed], dtype=torch.long, device="cpu"), group=group)
    if any(flags):
        found: list[Any] = [None] * len(flags)
        plain = inspect.unwrap(dist.distributed_c10d.all_gather_object)
        plain(found, named["obj"] if failed else None, group)
        _refuse("gather_object", found)
    original(*asked.args, **asked.kwargs)


def patch(patch_inner: Callable[[str, Callable[[_Function, inspect.BoundArguments], Any]], None]) -> None:
    """Replaces the functions; ``patch_inner(name, ours)`` replaces one for groups of unisono."""

    def exchange(name: str, gives: str, takes: str, rooted: bool = False) -> None:
        patch_inner(name, functools.partial(_exchange, name, gives, takes, rooted))

    exchange("all_gather_object", "obj", "object_list")
    exchange("broadcast_object_list", "object_list", "object_list", rooted=True)
    exchange("scatter_object_list", "scatter_object_input_list", "scatter_object_output_list", rooted=True)
    exchange("send_object_list", "object_list", "")
    exchange("recv_object_list", "", "object_list")
    patch_inner("gather_object", _gather_object)

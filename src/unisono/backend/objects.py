"""torch's collectives of Python objects, so that an object which can not be pickled is an error on every rank.

torch pickles before it asks any backend: the rank whose object fails raises, alone, and the others wait for it. Here
the objects are pickled first, and a failure travels in place of the object through the exchange that the others make
anyway; then all ranks raise the same error, and the group is in step. `install` puts these functions in torch's place;
groups of other backends go through torch's own, as before.
"""

import functools
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unisono.errors import UsageError

__all__ = ["install", "replaced"]


class _Pickled:
    """An object that is pickled already: unpickling this gives the object itself."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self.data,)


_KINDS = (TypeError, AttributeError, pickle.PicklingError)
"""What pickle raises; the error on every rank is one of these too, for programs that expect it."""


class _Failure:
    """Stands for an object that rank ``rank`` (global) could not pickle."""

    def __init__(self, rank: int, what: str, error: Exception) -> None:
        self.rank, self.what, self.text = rank, what, f"{type(error).__name__}: {error}"
        self.kind = next((kind for kind in _KINDS if type(error) is kind), TypeError)


def _packed(objects: Sequence[Any], what: str) -> list[Any]:
    """Each object pickled; if one can not be, its failure in place of every object."""
    import torch.distributed as dist

    packed: list[Any] = []
    for k, thing in enumerate(objects):
        file = io.BytesIO()
        try:
            dist.distributed_c10d._pickler(file).dump(thing)
        except Exception as error:
            named = what if len(objects) == 1 else f"{what} no. {k}"
            return [_Failure(dist.get_rank(), named, error)] * len(objects)
        packed.append(_Pickled(file.getvalue()))
    return packed


def _refuse(op: str, found: Sequence[Any]) -> None:
    """Raises if there is a failure among the objects."""
    failures = dict.fromkeys((f.rank, f.what, f.text) for f in found if isinstance(f, _Failure))
    if failures:
        words = "; ".join(f"{what} of rank {rank} can not be pickled: {text}" for rank, what, text in failures)
        kind = next(f.kind for f in found if isinstance(f, _Failure))
        raised = type("UsageError", (UsageError, kind), {"__module__": UsageError.__module__})
        raise raised(f"{op}: {words}. No rank has received anything, and the group can still be used")


def _all_gather_object(original: Callable[..., Any], object_list: list[Any], obj: Any, group: Any = None) -> None:
    import torch.distributed as dist

    found = [None] * len(object_list)
    original(found, _packed([obj], "the object")[0], group)
    _refuse("all_gather_object", found)
    _assign(object_list, found[: dist.get_world_size(group)])


def _assign(objects: Any, found: Sequence[Any]) -> None:
    """Puts what was found into the user's list, or what serves as one, item by item as torch does."""
    for k, thing in enumerate(found):
        objects[k] = thing


def _gather_object(
    original: Callable[..., Any],
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
) -> None:
    """The objects go to one rank alone, so that whether all could be pickled is asked of all before."""
    import torch.distributed as dist

    (packed,) = _packed([obj], "the object")
    flags = [torch.empty(1, dtype=torch.long, device="cpu") for _ in range(dist.get_world_size(group))]
    failed = torch.tensor([isinstance(packed, _Failure)], dtype=torch.long, device="cpu")
    dist.all_gather(flags, failed, group=group)
    if any(flags):
        found = [None] * len(flags)
        _original("all_gather_object")(found, packed if isinstance(packed, _Failure) else None, group)
        _refuse("gather_object", found)
    original(packed, object_gather_list, dst, group, group_dst)


def _broadcast_object_list(original: Callable[..., Any], object_list: list[Any], *args: Any, **kwargs: Any) -> None:
    given = dict(zip(("src", "group", "device", "group_src"), args, strict=False)) | kwargs
    found = list(object_list)
    if _is_root(given):
        found = _packed(object_list, "the object")
    original(found, *args, **kwargs)
    _refuse("broadcast_object_list", found)
    if not _is_root(given):
        _assign(object_list, found)


def _scatter_object_list(
    original: Callable[..., Any],
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    given = dict(zip(("src", "group", "group_src"), args, strict=False)) | kwargs
    inputs = scatter_object_input_list
    if _is_root(given) and inputs is not None:
        inputs = _packed(inputs, "the object")
    found = list(scatter_object_output_list)
    original(found, inputs, *args, **kwargs)
    _refuse("scatter_object_list", found[:1])
    _assign(scatter_object_output_list, found[:1])


def _send_object_list(original: Callable[..., Any], object_list: list[Any], *args: Any, **kwargs: Any) -> None:
    packed = _packed(object_list, "the object")
    original(packed, *args, **kwargs)
    _refuse("send_object_list", packed)


def _recv_object_list(original: Callable[..., Any], object_list: list[Any], *args: Any, **kwargs: Any) -> Any:
    found = list(object_list)
    source = original(found, *args, **kwargs)
    _refuse("recv_object_list", found)
    _assign(object_list, found)
    return source


def _is_root(given: dict[str, Any]) -> bool:
    """Whether this rank is the one that a call's ``src`` or ``group_src`` names; torch's own check follows.

    A rank is asked of the group itself, as torch does: a group whose members have no default group in common numbers
    them otherwise than theirs do.
    """
    import torch.distributed as dist

    group: Any = given.get("group") or dist.group.WORLD
    root = given.get("group_src")
    if root is None:
        try:
            root = dist.get_group_rank(group, given.get("src") or 0)
        except ValueError:  # not a member: torch says so
            return False
    return bool(group.rank() == root)


_OURS: dict[str, tuple[Callable[..., Any], int]] = {
    # torch's function, ours, and where it takes its group if that is given by place
    "all_gather_object": (_all_gather_object, 2),
    "gather_object": (_gather_object, 3),
    "broadcast_object_list": (_broadcast_object_list, 2),
    "scatter_object_list": (_scatter_object_list, 3),
    "send_object_list": (_send_object_list, 2),
    "recv_object_list": (_recv_object_list, 2),
}


def _original(name: str) -> Callable[..., Any]:
    import torch.distributed as dist

    function: Callable[..., Any] = getattr(dist.distributed_c10d, name)
    return function.__wrapped__  # type: ignore[attr-defined, no-any-return]


def _serves(args: Sequence[Any], kwargs: dict[str, Any], place: int) -> bool:
    """Whether the call's group is one of ours, and this rank in it."""
    import torch.distributed as dist

    loaded = sys.modules.get("unisono.backend.process_group")  # no group is ours as long as nobody has made one
    group = kwargs.get("group", args[place] if len(args) > place else None) or dist.group.WORLD
    return loaded is not None and isinstance(group, loaded.UnisonoProcessGroup)


def replaced(original: Callable[..., Any], ours: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A function that calls ``ours`` for groups of unisono, torch's ``original`` for all others."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs) if _serves(args, kwargs, place) else original(*args, **kwargs)

    return function


def install() -> None:
    """Puts these functions in the place of torch's, once."""
    import torch.distributed as dist

    for name, (ours, place) in _OURS.items():
        original = getattr(dist.distributed_c10d, name)
        if getattr(dist, name) is original:
            function = replaced(original, ours, place)
            setattr(dist.distributed_c10d, name, function)
            setattr(dist, name, function)

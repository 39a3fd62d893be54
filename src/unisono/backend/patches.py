"""All that unisono changes in torch and in the interpreter: these at a process's first group.

    objects          six torch.distributed functions: an object that can not be pickled is an error on every rank
    sync_batch_norm  nn.SyncBatchNorm.forward, and DDP's check for it: torch refuses CPU tensors before any backend is
                     asked
    excepthook       sys.excepthook: peers read which exception has ended this rank
    devices          where there are GPUs: batch_isend_irecv, split_group (device_patches.py)

and this when the backend is registered, for it decides where the first group meets:

    launchers        torch.distributed's env:// rendezvous, where it would fail: RANK is unset, and there are the
                     variables of mpiexec or srun. Any backend is served. torch has a public way to add a scheme, and
                     launcher:// is there too, but none to add to what init_process_group does without one. For
                     unisono's groups a line in the log says who is missing where ranks wait for each other, and
                     that the folder of a file:// rendezvous is

``UNISONO_PATCHES`` names those that are applied, separated by commas, or is ``none``; unset or empty, all are. Groups
of other backends go through torch's own code, as before. A name that a program has imported before its first group
(``from torch.distributed import all_gather_object``) is served too.

    gloo             UNISONO_REPLACES=gloo alone, and then at ``import torch``: who asks torch for Gloo gets unisono

For programs whose framework names the backend itself and takes no other: Accelerate, and with it Hugging Face's Trainer
and TRL, start CPU ranks with "gloo" whatever they are told. torch has no setting for it, and creates Gloo's groups
without asking the registry of backends; so the functions that take a backend's name are wrapped. What the program asks
for is also what torch tells it: frameworks compare `get_backend` with the names that they know, and Ignite leaves out
data parallelism where it knows none.

torch is imported inside the functions: `import unisono` stays light.
"""

import functools
import importlib
import inspect
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from unisono.errors import UsageError

__all__ = ["apply", "at_first_group", "call_before_excepthook", "normaliser", "replace_gloo", "serve_launchers"]

VARIABLE, GLOO = "UNISONO_PATCHES", "UNISONO_REPLACES"
_LAUNCHERS = "launchers"
at_first_group: list[Callable[[], object]] = []
"""Called, each once, when this process makes its first group, after the patches."""
normaliser: Callable[[], Any] | None = None
"""Loads the batch normalisation of `unisono.parallel`, which the backend may not import."""
_Function = Callable[..., Any]
_applied: set[str] = set()


def _wanted(name: str) -> bool:
    """True if a patch is applied. Raises `UsageError` for a value of the variable that names another."""
    text = os.environ.get(VARIABLE)
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    known = [*_PATCHES, _LAUNCHERS]
    names = [part for part in parts if part != "none"] if parts else known
    if unknown := set(names) - set(known):
        raise UsageError(
            f"{VARIABLE} is {text!r}, which names {', '.join(sorted(unknown))}: expected none, or some of "
            f"{', '.join(known)}, separated by commas"
        )
    return name in names and name not in _applied


def apply() -> None:
    """Applies the patches that are wanted, once; called when a group is made. Raises `UsageError`, see `_wanted`."""
    for name, patch in _PATCHES.items():
        if _wanted(name):
            _applied.add(name)
            patch()
    while at_first_group:
        at_first_group.pop()()


def _patch_inner(name: str, ours: Callable[[_Function, inspect.BoundArguments], Any]) -> None:
    """Patches torch.distributed's function ``name``, see `_for_our_groups`.

    torch decorates it by a function that logs exceptions. The patch replaces what the decorator calls, so that names
    imported earlier are served too.
    """
    import torch.distributed as dist

    decorated = getattr(dist, name)
    inner = inspect.unwrap(decorated)
    for cell in decorated.__closure__ or ():
        if cell.cell_contents is inner:
            cell.cell_contents = _for_our_groups(inner, ours)
            return
    _put(name, _for_our_groups(decorated, ours))


def _put(name: str, function: _Function) -> None:
    """Puts a function in the place of torch.distributed's."""
    import torch.distributed as dist

    setattr(dist.distributed_c10d, name, function)
    setattr(dist, name, function)


def _for_our_groups(original: _Function, ours: Callable[[_Function, inspect.BoundArguments], Any]) -> _Function:
    """A function that calls ``ours(original, arguments)`` where the group is unisono's, torch's own elsewhere."""
    import torch.distributed as dist

    signature = inspect.signature(original)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        loaded = sys.modules.get("unisono.backend.process_group")  # no group is ours before one has been made
        try:
            asked = signature.bind(*args, **kwargs)
        except TypeError:  # torch says it better
            return original(*args, **kwargs)
        asked.apply_defaults()
        group = asked.arguments["group"] or dist.group.WORLD
        if loaded is None or not isinstance(group, loaded.UnisonoProcessGroup):
            return original(*args, **kwargs)
        return ours(original, asked)

    return function


# Objects. torch pickles before it asks any backend: the rank whose object fails raises, alone, and the others wait for
# it. Here the objects are pickled first, and a failure travels in place of the object through the exchange that the
# others make anyway; then all ranks raise the same error, and the group is in step.


class _Pickled:
    """An object that is pickled already: unpickling this gives the object itself."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self.data,)


_KINDS = (TypeError, AttributeError, pickle.PicklingError)
"""Errors of pickle; the error on every rank is one of these too, for programs that expect it."""


class _Failure:
    """Stands for an object that rank ``rank`` (global) could not pickle."""

    def __init__(self, rank: int, what: str, error: Exception) -> None:
        self.rank, self.what, self.text = rank, what, f"{type(error).__name__}: {error}"
        self.kind = next((kind for kind in _KINDS if type(error) is kind), TypeError)


def _packed(objects: Sequence[Any]) -> list[Any]:
    """Each object pickled; if one can not be, its failure in place of every object."""
    import torch.distributed as dist

    packed: list[Any] = []
    for k, thing in enumerate(objects):
        file = io.BytesIO()
        try:
            dist.distributed_c10d._pickler(file).dump(thing)
        except Exception as error:
            named = "the object" if len(objects) == 1 else f"the object no. {k}"
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


def _is_root(given: dict[str, Any]) -> bool:
    """True if this rank is the one that a call's ``src`` or ``group_src`` names; torch's own check follows.

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


def _exchange(name: str, gives: str, takes: str, rooted: bool, original: _Function, asked: Any) -> Any:
    """Calls torch's ``original`` with what is in the argument ``gives`` pickled, then fills the list ``takes``."""
    named = asked.arguments
    user, given, single = named.get(takes), named.get(gives), gives == "obj"
    giving = gives in named and (single or given is not None) and (not rooted or _is_root(named))
    found = list(user) if user is not None else None
    if takes:
        named[takes] = found
    if giving:
        packed = _packed([given] if single else given)
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
    import torch
    import torch.distributed as dist

    named, group = asked.arguments, asked.arguments["group"]
    (named["obj"],) = _packed([named["obj"]])
    failed = isinstance(named["obj"], _Failure)
    flags = [torch.empty(1, dtype=torch.long, device="cpu") for _ in range(dist.get_world_size(group))]
    dist.all_gather(flags, torch.tensor([failed], dtype=torch.long, device="cpu"), group=group)
    if any(flags):
        found: list[Any] = [None] * len(flags)
        plain = inspect.unwrap(dist.distributed_c10d.all_gather_object)
        plain(found, named["obj"] if failed else None, group)
        _refuse("gather_object", found)
    original(*asked.args, **asked.kwargs)


def _patch_objects() -> None:
    def exchange(name: str, gives: str, takes: str, rooted: bool = False) -> None:
        ours = functools.partial(_exchange, name, gives, takes, rooted)
        _patch_inner(name, ours)

    exchange("all_gather_object", "obj", "object_list")
    exchange("broadcast_object_list", "object_list", "object_list", rooted=True)
    exchange("scatter_object_list", "scatter_object_input_list", "scatter_object_output_list", rooted=True)
    exchange("send_object_list", "object_list", "")
    exchange("recv_object_list", "", "object_list")
    _patch_inner("gather_object", _gather_object)


# SyncBatchNorm


def _patch_sync_batch_norm() -> None:
    """Normalises CPU tensors of groups of unisono as `unisono.parallel` does."""
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    kind: Any = nn.SyncBatchNorm
    plain, refuse = kind.forward, DistributedDataParallel._passing_sync_batchnorm_handle

    def ours(group: Any) -> bool:
        return dist.is_initialized() and "unisono" in dist.get_backend_config(group)

    @functools.wraps(plain)
    def forward(self: Any, input: Any) -> Any:
        if not (normaliser and self.training and input.device.type == "cpu" and ours(self.process_group)):
            return plain(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        return normaliser()(self, input, self.process_group)

    @functools.wraps(refuse)
    def refuse_elsewhere(self: Any, module: nn.Module) -> None:
        if self.device_type != "cpu" or not ours(self.process_group):
            refuse(self, module)  # type: ignore[no-untyped-call]

    kind.forward = forward
    DistributedDataParallel._passing_sync_batchnorm_handle = refuse_elsewhere  # type: ignore[method-assign]


# The interpreter's hook

_before_excepthook: list[Callable[[BaseException], object]] = []


def call_before_excepthook(listener: Callable[[BaseException], object]) -> None:
    """Calls ``listener`` with the exception that ends the program, before all other hooks."""
    if listener not in _before_excepthook:
        _before_excepthook.append(listener)


def _patch_excepthook() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        for listener in _before_excepthook:
            listener(error)
        before(kind, error, trace)

    sys.excepthook = hook


_PATCHES: dict[str, Callable[[], Any]] = {
    "objects": _patch_objects, "sync_batch_norm": _patch_sync_batch_norm, "excepthook": _patch_excepthook,
    "devices": lambda: importlib.import_module("unisono.backend.device_patches").patch(_put),
}  # fmt: skip


# Launchers


def serve_launchers() -> None:
    """Makes ``launcher://`` known to torch, and has ``env://`` serve ranks of mpiexec and srun; called once."""
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # the package has a function of that name
    rendezvous.register_rendezvous_handler("launcher", _launcher_handler)
    handlers = getattr(rendezvous, "_rendezvous_handlers", {})
    for scheme in handlers.keys() & {"env", "file"}:
        handlers[scheme] = _handler(handlers[scheme])


def _launcher_handler(url: str, timeout: Any = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    from unisono.backend.launchers import by_scheme

    return by_scheme(url, timeout)


def _handler(original: _Function) -> _Function:
    @functools.wraps(original)
    def handler(url: str, timeout: Any = None, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        from unisono.backend.rendezvous_watch import await_folder, for_our_group, watched

        ours = for_our_group()
        given = kwargs if timeout is None else {"timeout": timeout, **kwargs}
        met: Iterator[tuple[Any, int, int]] = original(url, **given)
        if url.startswith("file:"):
            if ours:
                await_folder(url, timeout)
            return met
        if "RANK" not in os.environ and "rank=" not in url and _wanted(_LAUNCHERS):
            from unisono.backend.launchers import launched, rendezvous

            met = rendezvous(place, timeout) if (place := launched()) is not None else met
        return watched(met) if ours else met

    return handler


# Gloo's name

_NAMES = {"gloo": "unisono", "cpu:gloo": "cpu:unisono"}
"""The backend a program names, and the one it gets. A name that serves a GPU too is left to torch."""


def _naming(original: _Function) -> _Function:
    """The function of torch's with its argument ``backend`` replaced."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(*args, **kwargs)
        name = asked.arguments.get("backend")
        if isinstance(name, str):
            asked.arguments["backend"] = _NAMES.get(name.lower(), name)
        return original(*asked.args, **asked.kwargs)

    return function


def _get_backend(original: Callable[..., str], asked: Any) -> str:
    """The name that the program gave."""
    name = original(*asked.args)
    return next((given for given, ours in _NAMES.items() if ours == name), name)


def _monitored_barrier(original: _Function, asked: Any) -> None:
    import torch.distributed as dist

    group, *rest = asked.args
    ours: Any = group or dist.group.WORLD
    ours.monitored_barrier(*rest)


def replace_gloo() -> None:
    """Wraps torch's functions, once, if the environment asks for it."""
    import torch.distributed as dist

    asked = os.environ.get(GLOO)
    if not asked:
        return
    if asked != "gloo":
        raise UsageError(f"{GLOO}={asked}: only gloo can be replaced; set it to gloo, or unset it")
    dist.Backend.default_device_backend_map["cpu"] = "unisono"
    for name in ("init_process_group", "new_group"):
        _put(name, _naming(getattr(dist, name)))
    _put("get_backend", _for_our_groups(dist.get_backend, _get_backend))
    _put("monitored_barrier", _for_our_groups(dist.monitored_barrier, _monitored_barrier))  # torch's is for Gloo alone

"""All that unisono changes in torch and in the interpreter: these at a process's first group.

    objects          six torch.distributed functions: an object that can not be pickled is an error on every rank
                     (object_patches.py)
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
import os
import sys
from collections.abc import Callable, Iterator
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
    "objects": lambda: importlib.import_module("unisono.backend.object_patches").patch(_patch_inner),
    "sync_batch_norm": _patch_sync_batch_norm, "excepthook": _patch_excepthook,
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

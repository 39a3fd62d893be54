"""unisono: collective communication and parallel training for PyTorch.

A schedule is a value, and a few verbs say everything about it:

    build, verify, simulate, draw, run, select

Importing this package makes the ``torch.distributed`` backend ``"unisono"`` known, if torch is there, and loads nothing
else: every name below but the errors is imported when it is first used. Installed, the backend is known after
``import torch`` alone.
"""

import os as _os
import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from unisono.backend import patches as _patches
from unisono.backend import register as _register
from unisono.errors import (
    CollectiveTimeout,
    CorruptionError,
    DeadlockError,
    MismatchError,
    PeerLostError,
    ScheduleError,
    UnisonoError,
    UpdateError,
    UsageError,
)

if TYPE_CHECKING:
    from unisono.algorithms import build, register_algorithm
    from unisono.backend.options import Options, algorithm
    from unisono.backend.persistent import prepare
    from unisono.backend.shrinking import shrink
    from unisono.drawing import Drawing, draw
    from unisono.runtime.run import run
    from unisono.schedule import Collective, PipelineSchedule, Schedule, Step, Topology, Transfer
    from unisono.selection import select
    from unisono.simulation import PipelineCosts, simulate
    from unisono.transport.shared_tensor import empty
    from unisono.verification import verify
    from unisono.watch.flight import dump_flight_record

__all__ = [
    "Collective",
    "CollectiveTimeout",
    "CorruptionError",
    "DeadlockError",
    "Drawing",
    "MismatchError",
    "Options",
    "PeerLostError",
    "PipelineCosts",
    "PipelineSchedule",
    "Schedule",
    "ScheduleError",
    "Step",
    "Topology",
    "Transfer",
    "UnisonoError",
    "UpdateError",
    "UsageError",
    "__version__",
    "algorithm",
    "build",
    "draw",
    "dump_flight_record",
    "empty",
    "prepare",
    "register_algorithm",
    "run",
    "select",
    "shrink",
    "simulate",
    "verify",
]

__version__ = "0.1.0"

_HOMES = {
    "algorithms": "build register_algorithm",
    "backend.options": "Options algorithm",
    "backend.persistent": "prepare",
    "backend.shrinking": "shrink",
    "drawing": "Drawing draw",
    "runtime.run": "run",
    "schedule": "Collective PipelineSchedule Schedule Step Topology Transfer",
    "selection": "select",
    "simulation": "PipelineCosts simulate",
    "transport.shared_tensor": "empty",
    "verification": "verify",
    "watch.flight": "dump_flight_record",
}
_HOME_OF = {name: f"unisono.{home}" for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if "torch" in _sys.modules or _os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
    _register.register()
# Otherwise torch, once imported, registers the backend itself through its entry point: the command line stays light.


def _normaliser() -> object:
    from unisono.parallel.data.sync_batch_norm import normalise

    return normalise


_patches.normaliser = _normaliser

if _os.environ.get("UNISONO_TRACE"):
    from unisono.trace import arm as _arm

    _arm()

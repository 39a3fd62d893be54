"""unisono: collective communication and parallel training for PyTorch.

Importing it registers the ``torch.distributed`` backend ``"unisono"`` and has no other side effect; installed, it is
registered by ``import torch`` alone.
"""

import os
import sys

from unisono.backend import patches as _patches
from unisono.backend import register as _register
from unisono.backend.options import Options, algorithm
from unisono.backend.persistent import prepare
from unisono.errors import (
    CollectiveTimeout,
    DeadlockError,
    MismatchError,
    PeerLostError,
    ScheduleError,
    UnisonoError,
    UsageError,
)
from unisono.transport.shared_tensor import empty
from unisono.watch.flight import dump_flight_record

__all__ = [
    "CollectiveTimeout",
    "DeadlockError",
    "MismatchError",
    "Options",
    "PeerLostError",
    "ScheduleError",
    "UnisonoError",
    "UsageError",
    "__version__",
    "algorithm",
    "dump_flight_record",
    "empty",
    "prepare",
]

__version__ = "0.1.0"


if "torch" in sys.modules or os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
    _register.register()
# Otherwise torch, once imported, registers the backend itself through its entry point: the command line stays light.


def _normaliser() -> object:
    from unisono.parallel.sync_batch_norm import normalise

    return normalise


_patches.normaliser.append(_normaliser)

if os.environ.get("UNISONO_TRACE"):
    from unisono.trace.arm import arm as _arm

    _arm()

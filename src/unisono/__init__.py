"""unisono: collective communication and parallel training for PyTorch.

Importing it registers the ``torch.distributed`` backend ``"unisono"`` and has no other side effect.
"""

from unisono.backend.register import register
from unisono.errors import (
    CollectiveTimeout,
    DeadlockError,
    MismatchError,
    PeerLostError,
    ScheduleError,
    UnisonoError,
    UsageError,
)

__all__ = [
    "CollectiveTimeout",
    "DeadlockError",
    "MismatchError",
    "PeerLostError",
    "ScheduleError",
    "UnisonoError",
    "UsageError",
    "__version__",
]

__version__ = "0.1.0"

register()

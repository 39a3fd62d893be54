"""How collectives end that do not end well."""

from collections.abc import Sequence
from typing import Any

import torch

from unisono.errors import MismatchError, UnisonoError, UsageError
from unisono.transport.arena import keep, place

__all__ = ["Agreed", "broken", "keep_shared"]


class Agreed(Exception):
    """All ranks have met over an error of a call: it ends, and the lane goes on."""

    def __init__(self, error: MismatchError | UsageError) -> None:
        super().__init__(str(error))
        self.error = error


def keep_shared(outputs: Sequence[Any]) -> None:
    """The memory of results that a late peer may write to although the call has failed here is not used again."""
    keep(*(t for t in outputs if isinstance(t, torch.Tensor) and t.is_cpu and place(t.data_ptr(), t.nbytes) >= 0))


def broken(error: BaseException) -> UnisonoError:
    """The error of a collective whose program, or whatever carried it, raised ``error``."""
    return UnisonoError(f"a collective broke off inside: {type(error).__name__}: {error}")

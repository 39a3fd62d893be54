"""How calls end that do not end well."""

from collections.abc import Sequence
from typing import Any

import torch

from unisono.errors import MismatchError, UnisonoError, UsageError
from unisono.transport.arena import keep, place
from unisono.transport.process import alive, stopped
from unisono.transport.segment import Segment
from unisono.watch.flight import save_after
from unisono.watch.page import Watch

__all__ = ["Agreed", "broken", "keep_shared", "save_records"]

_PATIENCE = 0.3  # s: how long a failing rank waits for the others to write their flight records


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


def save_records(error: BaseException, segment: Segment, rank: int, watch: Watch) -> None:
    """Writes the flight record of ``rank`` and asks the others for theirs, if that is wanted and the error serious."""

    def ask_peers(folder: str) -> None:
        peers = [segment.identity(peer) for peer in range(segment.layout.world_size) if peer != rank]
        watch.records_of([peer for peer in peers if alive(peer) and not stopped(peer)], folder, _PATIENCE)

    save_after(error, ask_peers)

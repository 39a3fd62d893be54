"""Whose calls are measured: what a backend must be able to do to be a contender."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from unisono.bench.cases import Case

__all__ = ["Caller"]


class Caller(Protocol):
    """One backend on this rank, joined with the other ranks; it is made, and ends, with a ``with`` block.

    ``call`` and ``output`` are what is measured and checked. The first contender's caller also rules the walk, by
    ``barrier`` and ``everybody``.
    """

    def call(self, case: Case, asynchronous: bool, persistent: bool = False) -> Callable[[], Any]:
        """A function that makes one call on the case's buffers and is back when it is done."""

    def output(self, case: Case) -> torch.Tensor:
        """Where the result lies after a call."""

    def barrier(self) -> None:
        """No rank is back before all have come."""

    def everybody(self, numbers: torch.Tensor) -> torch.Tensor:
        """The numbers of all ranks, in rank order: ``[ranks * n]`` for ``[n]``, float64."""

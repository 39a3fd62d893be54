"""How numbers are carried through a schedule: in which dtype, how combined, how finished.

Partial sums travel, so they are kept in the accumulation dtype: bfloat16, float16 and float8 go through a schedule as
float32 (complex32 as complex64) and are rounded once, at the end: two (four) times the bytes, and no accuracy lost.
AVG divides at the end, PREMUL_SUM scales at the start. In a deterministic run contributions travel unreduced, in the
tensor's own dtype, and are summed all at once, in rank order, exactly as by the backend's own path.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from unisono.run.reduce import Reducer, reducer

__all__ = ["Arithmetic", "arithmetic"]


class Arithmetic:
    """What happens to the numbers of one collective; an empty `op` only moves data, of any dtype."""

    def __init__(self, dtype: torch.dtype, op: str, factor: float, world_size: int, deterministic: bool) -> None:
        whole = reducer(dtype, op, factor) if op else None
        wide = whole.wide if whole is not None and not deterministic else None
        self.dtype = dtype
        self.carried = wide or dtype
        self._whole = whole
        self._scaled = op == "PREMUL_SUM"
        self._divisor = world_size if op == "AVG" and not deterministic else 1
        partial = "SUM" if op in ("AVG", "PREMUL_SUM") else op
        self._partial: Reducer | None = reducer(self.carried, partial) if op else None

    @property
    def in_place(self) -> bool:
        """Whether the user's numbers can be worked on where they are."""
        return self.carried == self.dtype and not self._scaled

    def load(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Brings a contribution into the work tensor."""
        into.copy_(self._whole.prepared(source) if self._scaled and self._whole is not None else source)

    def combine(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Combines partial sums in the order given; `out` may be one of them."""
        assert self._partial is not None
        self._partial(parts, out)

    def total(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Combines all contributions, in rank order, and finishes: a deterministic run's sum."""
        assert self._whole is not None
        self._whole(parts, out)

    def finish(self, total: torch.Tensor) -> None:
        """Turns a complete partial sum into the result, in place."""
        if self._divisor > 1:
            total.div_(self._divisor)


@lru_cache(maxsize=512)
def arithmetic(dtype: torch.dtype, op: str, factor: float, world_size: int, deterministic: bool) -> Arithmetic:
    """The arithmetic of a collective; cached. Raises UsageError where the op means nothing for the dtype."""
    return Arithmetic(dtype, op, factor, world_size, deterministic)

"""Many small tensors of a replica: a version is copied into them by one call of the loop, all of them at once.

To exchange the memory of one takes as long as to copy some thousand bytes, and what is copied keeps its place.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from unisono.weights.holdings import Memory
from unisono.weights.rows import Rows
from unisono.weights.terms import Key

__all__ = ["SmallTensors"]

_MANY, _NBYTES = 256, 4096


class SmallTensors:
    """Those of a replica's tensors that are copied: of at most 4096 bytes each, if there are 256 or more of them."""

    def __init__(self, tensors: Mapping[str, Tensor], alone: Collection[str]) -> None:
        """``alone``: the names whose memory has no gaps, and is no other name's."""
        found = {name for name in alone if _copied_as_bytes(tensors[name]) and tensors[name].nbytes <= _NBYTES}
        self.names = found if len(found) >= _MANY else set[str]()
        self._bound: tuple[list[str], Key, Key] = [], (), ()
        self._rows, self._others = Rows([]), list[str]()  # some that a subclass of the engine has put in their place

    def copy(self, names: list[str], source: Memory, target: Memory) -> None:
        """Copies some of them; few by torch, for to bind them takes longer."""
        others = names
        if len(names) >= _MANY:
            if self._bound != (names, source.pointers, target.pointers):
                self._bind(names, source, target)
            self._rows.move(0, 0)
            others = self._others
        if others:
            torch._foreach_copy_([target.tensors[name] for name in others], [source.tensors[name] for name in others])

    def _bind(self, names: list[str], source: Memory, target: Memory) -> None:
        ends = {name: (source.tensors[name], target.tensors[name]) for name in names}
        alike = [name for name, (one, other) in ends.items() if _alike(one, other)]
        self._rows = Rows([_row(*ends[name]) for name in alike])
        self._others = [name for name in names if name not in set(alike)] if len(alike) < len(names) else []
        self._bound = names, source.pointers, target.pointers


def _copied_as_bytes(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg())


def _alike(source: Tensor, target: Tensor) -> bool:
    return source.dtype == target.dtype and source.stride() == target.stride() and _copied_as_bytes(source)


def _row(source: Tensor, target: Tensor) -> list[int]:
    return [source.data_ptr(), target.data_ptr(), target.nbytes, 0, 0, *(1, 0, 0, 0) * 4]

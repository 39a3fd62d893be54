"""The user's tensors and the work tensor: in place where that is safe, else copied in first and out last.

A rank gives one flat tensor per block that it contributes, and takes one per block that it shall have:

    collective       sources                    results
    all_reduce       [tensor]                   [tensor]
    reduce           [tensor]                   [tensor] at the root, else []
    broadcast        [tensor] at the root       [tensor]
    reduce_scatter   one per rank               [its own]
    all_gather       [its own]                  one per rank
    gather           [its own]                  one per rank at the root, else []
    scatter          one per rank at the root   [its own]
    all_to_all       one per rank (to)          one per rank (from)
    barrier          [token]                    [token]

Senders' memory is never written: a rank works in place on its results, or on its sources if nothing lands there.
"""

from collections.abc import Sequence

import torch

from unisono.errors import UsageError
from unisono.run.arithmetic import Arithmetic
from unisono.run.layout import Layout
from unisono.run.plan import Span

__all__ = ["Operands"]

Tensors = Sequence[torch.Tensor]


class Operands:
    """One run's tensors. `in_place`: the work tensor is the user's memory, else scratch of the size that is needed.

    Raises UsageError if the number of tensors or a size is wrong.
    """

    def __init__(self, layout: Layout, sources: Tensors, results: Tensors, numbers: Arithmetic) -> None:
        self._plan, self._numbers = layout.plan, numbers
        self._sources, self._results = sources, results
        _check(layout, "source", sources, self._plan.blocks_before)
        _check(layout, "result", results, self._plan.blocks_after)
        self._users = self._memory() if numbers.in_place else None
        self.in_place = self._users is not None
        self._scratch: torch.Tensor | None = None

    def _memory(self) -> torch.Tensor | None:
        """The user's memory as work tensor, if it has just the blocks that are needed, one after the other."""
        plan = self._plan
        if plan.chunks == plan.after:
            found = _joined(self._results)
            if found is not None:
                return found
        if plan.chunks == plan.before and not plan.writes:
            return _joined(self._sources)
        return None

    def load(self, where: Layout, first: int = 0) -> torch.Tensor:
        """The work tensor for a layout, with what this rank contributes in it.

        `first`: the element of every chunk with which the layout begins, if it is that of a piece.
        """
        if self._users is not None:
            work = self._users[first:]
        else:
            if self._scratch is None or self._scratch.numel() < where.numel:
                device = next((t.device for t in (*self._sources, *self._results)), torch.device("cpu"))
                self._scratch = torch.empty(where.numel, dtype=self._numbers.carried, device=device)
            work = self._scratch
        for index, offset, at, numel in self._runs(where, True):
            source, part = self._sources[index][first + offset :][:numel], work[at : at + numel]
            if not _same(source, part):
                self._numbers.load(source, part)
        return work

    def store(self, where: Layout, work: torch.Tensor, first: int = 0) -> None:
        """Finishes the sums in the work tensor and brings the results to the user."""
        for index, offset, at, numel in self._runs(where, False):
            result, part = self._results[index][first + offset :][:numel], work[at : at + numel]
            self._numbers.finish(part)
            if not _same(result, part):
                result.copy_(part)

    def _runs(self, where: Layout, load: bool) -> list[tuple[int, int, int, int]]:
        """(tensor, element in it, element in the work tensor, elements); kept with the layout."""
        found = where.compiled.get(("operands", load))
        if found is None:
            plan, pieces = self._plan, self._plan.collective.pieces
            blocks, first = (plan.blocks_before, plan.first_before) if load else (plan.blocks_after, plan.first_after)
            found = where.compiled["operands", load] = [
                (index, offsets[i], at, numel)
                for index, block in enumerate(blocks)
                for offsets in [where.offsets[block * pieces : (block + 1) * pieces]]
                for i, at, numel in where.runs(Span(first + block * pieces, pieces), offsets.__getitem__)
            ]
        assert isinstance(found, list)
        return found


def _check(layout: Layout, what: str, tensors: Tensors, wanted: Sequence[int]) -> None:
    name = f"{layout.plan.name} {layout.plan.collective.name}"
    if len(tensors) != len(wanted):
        raise UsageError(f"{name}: rank {layout.plan.rank} has {len(wanted)} {what}s, got {len(tensors)}")
    for block, tensor in zip(wanted, tensors, strict=True):
        if tensor.numel() != layout.sizes[block]:
            raise UsageError(
                f"{name}: {what} {block} of rank {layout.plan.rank} has {tensor.numel()} elements, "
                f"expected {layout.sizes[block]}"
            )


def _joined(tensors: Tensors) -> torch.Tensor | None:
    """Several flat tensors as the one they are parts of, or None if they do not lie one after the other."""
    if not tensors:
        return None
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += tensor.nbytes
    if len(tensors) == 1:
        return first
    return first.as_strided((sum(t.numel() for t in tensors),), (1,), first.storage_offset())


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.dtype == b.dtype

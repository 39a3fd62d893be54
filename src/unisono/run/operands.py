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

__all__ = ["Operands"]

Tensors = Sequence[torch.Tensor]


class Operands:
    """One run's tensors; `work` is the flat tensor of `layout.numel` elements that the plan is run on.

    Raises UsageError if the number of tensors or a size is wrong.
    """

    def __init__(self, layout: Layout, sources: Tensors, results: Tensors, numbers: Arithmetic) -> None:
        plan, self._numbers = layout.plan, numbers
        into, out = plan.blocks_before, plan.blocks_after
        _check(layout, "source", sources, into)
        _check(layout, "result", results, out)
        self._sources = [(t, layout.block(b, plan.first_before)) for b, t in zip(into, sources, strict=True)]
        self._results = [(t, layout.block(b, plan.first_after)) for b, t in zip(out, results, strict=True)]
        work = self._users(layout) if numbers.in_place else None
        if work is None:
            work = torch.empty(layout.numel, dtype=numbers.carried, device=_device(sources, results))
        self.work: torch.Tensor = work

    def _users(self, layout: Layout) -> torch.Tensor | None:
        """The user's memory as work tensor, if it has just the blocks that are needed, one after the other."""
        plan = layout.plan
        if plan.chunks == plan.after:
            found = _joined([tensor for tensor, _ in self._results])
            if found is not None:
                return found
        if plan.chunks == plan.before and not plan.writes:
            return _joined([tensor for tensor, _ in self._sources])
        return None

    def load(self) -> None:
        """Brings what this rank contributes into the work tensor."""
        for tensor, place in self._sources:
            part = self.work[place]
            if not _same(tensor, part):
                self._numbers.load(tensor, part)

    def store(self) -> None:
        """Finishes the sums and brings the results to the user."""
        for tensor, place in self._results:
            part = self.work[place]
            self._numbers.finish(part)
            if not _same(tensor, part):
                tensor.copy_(part)


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


def _device(sources: Tensors, results: Tensors) -> torch.device:
    return next((tensor.device for tensor in (*sources, *results)), torch.device("cpu"))

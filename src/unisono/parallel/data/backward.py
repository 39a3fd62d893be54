"""Starts each bucket's collective as soon as its gradients are there; torch's own Reducer, in C++, takes no such marks.

A hook on every parameter runs once its gradient is accumulated. Buckets start in one fixed order on all ranks, whatever
the order in which a rank completes them: bucket k waits for bucket k-1. What backward did not reach is started at its
end, by a callback of the autograd engine, which then waits for all; when `loss.backward()` returns, all is done.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn import Parameter

from unisono.parallel.data.buckets import GradientBucket

__all__ = ["BackwardWatch"]


class _Pass:
    """One backward pass with synchronisation: what is still missing, what has started."""

    def __init__(self, buckets: Sequence[GradientBucket]) -> None:
        self.buckets = buckets
        self.missing = [set(bucket.slots) for bucket in buckets]
        self.started = 0
        self.order: list[int] = []

    def start_complete(self, touched: AbstractSet[int]) -> None:
        while self.started < len(self.buckets) and not self.missing[self.started]:
            self.buckets[self.started].start(touched)
            self.started += 1


class BackwardWatch:
    """Hooks on parameters; `buckets` may be replaced between passes.

    Args:
        parameters: those that take gradients; a slot is an index into them.
        buckets: every slot is in one of them.
        ended: called at the end of a pass with the slots in the order they became ready.

    `paused`: gradients stay on this rank. `present`: the share of ranks that contribute to the means.

    """

    def __init__(
        self, parameters: Sequence[Parameter], buckets: Sequence[GradientBucket], ended: Callable[[list[int]], None]
    ) -> None:
        self.parameters = parameters
        self.buckets = buckets
        self.ended = ended
        self.paused = False
        self.present = 1.0
        self._touched: set[int] = set()
        self._pass: _Pass | None = None
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(slot))  # type: ignore[no-untyped-call]
            for slot, parameter in enumerate(parameters)
        ]

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def abandon(self) -> None:
        """Forget a pass that an exception cut short, once what it had started has ended."""
        if self._pass is not None:
            for bucket in self._pass.buckets[: self._pass.started]:
                bucket.finish(self.present)
            self._pass = None

    def pass_without_backward(self) -> None:
        """Take part in the collectives of the other ranks' backward pass.

        Where this rank does not count among those present, so do not the means of earlier passes that it still has:
        the others have them too, and all get them back.
        """
        if self.present < 1:
            for slot, parameter in enumerate(self.parameters):
                if slot not in self._touched and parameter.grad is not None:
                    parameter.grad.zero_()
        self._end(self._begin())

    def _hook(self, slot: int) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            self._touched.add(slot)
            if self.paused:
                return
            now = self._pass
            if now is None:
                now = self._begin()
                engine: Any = Variable._execution_engine
                engine.queue_callback(lambda: self._end(now))
            number = self._place[slot]
            self.buckets[number].take(slot)
            now.missing[number].discard(slot)
            now.order.append(slot)
            now.start_complete(self._touched)

        return ready

    def _begin(self) -> _Pass:
        self._place = {slot: number for number, bucket in enumerate(self.buckets) for slot in bucket.slots}
        self._pass = _Pass(self.buckets)
        return self._pass

    def _end(self, now: _Pass) -> None:
        if now is not self._pass:
            return
        for bucket, missing in zip(now.buckets, now.missing, strict=True):
            for slot in missing:
                bucket.take(slot)
            missing.clear()
        now.start_complete(self._touched)
        for bucket in now.buckets:
            bucket.finish(self.present)
        self._touched.clear()
        self._pass = None
        self.ended(now.order)

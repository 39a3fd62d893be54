"""One weight that several stages use, such as embedding and output layer, which torch's pipelines do not keep equal.

Each stage has a copy, and all copies stay equal. They begin with the values of the first stage's; after every step each
gets the sum of all their gradients, added in the order of stages on every rank, so that equal optimizers keep them
equal bit for bit.
"""

from collections.abc import Mapping
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.parallel.agreement import gather_objects, raise_on_all_ranks
from unisono.parallel.shards import Group, place
from unisono.schedule.pipeline import PipelineSchedule

__all__ = ["TiedWeight"]


class TiedWeight:
    """A weight of several stages, as one rank sees it.

    `names` says which parameter it is in each stage that has it: `{0: "embedding.weight", 3: "head.weight"}`. Making
    one is collective and copies the values. Raises UsageError on every rank if a stage lacks its parameter, or if
    shapes or dtypes differ.
    """

    def __init__(
        self, names: Mapping[int, str], modules: Mapping[int, nn.Module], schedule: PipelineSchedule, group: Group
    ) -> None:
        self._group, self._rank = group, place(group).rank
        here = {stage: dict(modules[stage].named_parameters(remove_duplicate=False)) for stage in modules}
        held = {stage: here[stage].get(names[stage]) for stage in sorted(names) if stage in modules}
        missing = [
            f"stage {stage} has no parameter {names[stage]!r}" for stage, weight in held.items() if weight is None
        ]
        missing += [f"there is no stage {stage} to tie" for stage in names if stage not in schedule.ranks]
        raise_on_all_ranks("; ".join(missing) or None, group)
        found = {stage: weight for stage, weight in held.items() if weight is not None}
        self.weights = list({id(weight): weight for weight in found.values()}.values())
        forms = gather_objects([(s, tuple(w.shape), str(w.dtype)) for s, w in found.items()], group)
        first, *others = sorted(chain.from_iterable(forms))
        wrong = [f"stage {s} has {d} {list(shape)}" for s, shape, d in others if (shape, d) != first[1:]]
        mismatch = f"a tied weight is {first[2]} {list(first[1])} in stage {first[0]}, but {', '.join(wrong)}"
        raise_on_all_ranks(mismatch if wrong else None, group)
        self.ranks = list(dict.fromkeys(schedule.ranks[stage] for stage in sorted(names)))
        self._before: list[Tensor | None] = []
        self._copy_values()

    def begin(self) -> None:
        """Set aside the gradients of earlier steps, which have been summed already."""
        self._before = [weight.grad for weight in self.weights]
        for weight in self.weights:
            weight.grad = None

    def finish(self) -> None:
        """Give every copy the sum of this step's gradients of all copies, on top of what was there before."""
        if not self.weights:
            return
        mine = torch.zeros_like(self.weights[0])
        for weight in self.weights:
            if weight.grad is not None:
                mine += weight.grad
        parts = self._exchange(mine, [torch.empty_like(mine) for _ in self.ranks])
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        for weight, before in zip(self.weights, self._before, strict=True):
            weight.grad = total.clone() if before is None else before.add_(total)
        self._before = []

    def _copy_values(self) -> None:
        if not self.weights:
            return
        with torch.no_grad():
            parts = self._exchange(self.weights[0].detach(), [torch.empty_like(self.weights[0]) for _ in self.ranks])
            for weight in self.weights:
                weight.copy_(parts[0])

    def _exchange(self, mine: Tensor, parts: list[Tensor]) -> list[Tensor]:
        """The tensors of all ranks that hold the weight, in the order of their first stages."""
        mine = mine.contiguous()
        operations = []
        for rank, part in zip(self.ranks, parts, strict=True):
            if rank == self._rank:
                part.copy_(mine)
            else:
                operations.append(dist.P2POp(dist.isend, mine, group=self._group, group_peer=rank))
                operations.append(dist.P2POp(dist.irecv, part, group=self._group, group_peer=rank))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return parts

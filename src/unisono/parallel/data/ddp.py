"""Data parallelism with the mean over all tokens and with uneven numbers of batches, which torch's DDP does not give.

    model = DistributedDataParallel(net)
    for inputs, targets in loader:
        loss_of(model(inputs), targets).backward()   # gradients are the mean over the ranks when this returns
        optimizer.step()

The design is that of Li et al. 2020 (PyTorch Distributed: Experiences on Accelerating Data Parallel Training):
gradients in buckets, averaged while backward still runs, in an order learnt from the first step. In torch's DDP the
mean is that of the ranks' means, ranks without data (`join`) still divide it, and a parameter that a rank did not use
needs a flag and a search through the graph. Here `mean_count` and `join` give the mean of all tokens over the ranks
that have some, and marks of use travel in the buckets.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.errors import UsageError
from unisono.parallel.agreement import check_structure
from unisono.parallel.data.backward import BackwardWatch
from unisono.parallel.data.buckets import GradientBucket, plan_buckets
from unisono.torch_names import all_gather_single

__all__ = ["DistributedDataParallel", "mean_count"]

BUCKET_NBYTES = 25 << 20
FIRST_BUCKET_NBYTES = 1 << 20

Batch = TypeVar("Batch")
_NO_MORE: Any = object()


def mean_count(count: float, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> float:
    """The mean of `count` (tokens, rows, weights of this rank's batch) over the ranks. Collective.

    A *summed* loss divided by it has, once gradients are averaged, the gradient of the mean over all tokens of all
    ranks; dividing by the rank's own count gives the mean of means, in which a token of a short batch weighs more.
    With gradient accumulation, pass the count of all microbatches of the step. Raises UsageError, on every rank, if a
    count is negative or not finite, or if all are 0.
    """
    counts = _gather([float(count)], group, torch.device(device))[:, 0]
    return _checked_mean(counts.tolist(), present=dist.get_world_size(group))


def _gather(row: list[float], group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """A few numbers of every rank: float64 (world_size, len(row)), on the CPU."""
    mine = torch.tensor(row, dtype=torch.float64, device=device)
    table = mine.new_empty(dist.get_world_size(group), len(row))
    all_gather_single(table.view(-1), mine, group)
    return table.cpu()


def _checked_mean(counts: list[float], present: int) -> float:
    for rank, count in enumerate(counts):
        if not 0 <= count < float("inf"):
            raise UsageError(f"rank {rank} of the group counts {count:g}, expected a finite number, 0 or more")
    if not sum(counts):
        raise UsageError(f"all {len(counts)} ranks count 0: there is nothing to take a mean of; skip the step")
    return sum(counts) / present


class DistributedDataParallel(nn.Module):
    """A module whose gradients are averaged over the ranks of a group during backward.

    Args:
        module: the same on all ranks, on CPU or one GPU each; weights and buffers are taken from the group's rank 0.
        group: default all ranks.
        bucket_nbytes: gradients that share one collective, about.
        first_bucket_nbytes: the first bucket is smaller, so that communication begins early.
        broadcast_buffers: before each forward pass in training, buffers are those of the first rank that has data.

    When `backward` returns, every `grad` is the mean and a view of its bucket. A parameter that no rank used keeps the
    gradient it had (None after zero_grad); one that some rank used gets the mean, unused ranks counting as zero. A pass
    in which a rank's loss reaches no parameter at all is no pass there: call `skip` on that rank.

    Raises MismatchError on every rank if the models differ in structure, UsageError if there is nothing to train, or
    in backward for a sparse gradient. An exception in backward leaves the ranks at different places: end the job.

    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        bucket_nbytes: int = BUCKET_NBYTES,
        first_bucket_nbytes: int = FIRST_BUCKET_NBYTES,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self.group = group
        self.broadcast_buffers = broadcast_buffers
        self.mean_count = float("nan")
        self._bucket_sizes = (bucket_nbytes, first_bucket_nbytes)
        self._parameters_averaged = [weight for weight in module.parameters() if weight.requires_grad]
        if not self._parameters_averaged:
            raise UsageError("the module has no parameter that takes a gradient: there is nothing to average")
        self._source = 0
        self._order_known = False
        buckets = self._plan(range(len(self._parameters_averaged) - 1, -1, -1))
        check_structure([*module.named_parameters(), *module.named_buffers()], group)
        self._spread([*module.parameters(), *module.buffers()])
        self._watch = BackwardWatch(self._parameters_averaged, buckets, self._pass_ended)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; arguments and result are its own."""
        if self.training and torch.is_grad_enabled() and not self._watch.paused:
            self._watch.abandon()
            self._spread_buffers()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: backward passes inside stay on this rank; the next one outside averages the sum of all."""
        before, self._watch.paused = self._watch.paused, True
        try:
            yield
        finally:
            self._watch.paused = before

    def join(self, batches: Iterable[Batch], count: Callable[[Batch], float] | None = None) -> Iterator[Batch | None]:
        """Go through this rank's batches until the last rank has used up its own; None where this rank has no more.

            for batch in model.join(loader, count=len):
                optimizer.zero_grad()
                if batch is None:
                    model.skip()
                else:
                    (summed_loss(model(batch)) / model.mean_count).backward()
                optimizer.step()

        Gradients are the mean over the ranks that have a batch, so weights stay equal on all. With `count` the
        attribute `mean_count` is set for each step, as from the function of that name, over those ranks. Collective
        once per step. Raises UsageError as `mean_count` does.
        """
        iterator = iter(batches)
        try:
            while True:
                batch = next(iterator, _NO_MORE)
                here = batch is not _NO_MORE
                row = [float(here), float(count(batch)) if here and count is not None else 0.0]
                table = _gather(row, self.group, self._parameters_averaged[0].device)
                present = int(table[:, 0].sum())
                if not present:
                    return
                self._source = int(table[:, 0].argmax())
                self._watch.present = present / len(table)
                if count is not None:
                    self.mean_count = _checked_mean(table[:, 1].tolist(), present)
                yield batch if here else None
        finally:
            self._source, self._watch.present, self.mean_count = 0, 1.0, float("nan")

    def skip(self) -> None:
        """Take part in one step of the other ranks without a batch: buffers, then gradients, to which this adds none.

        Inside `join` the mean leaves this rank out; elsewhere it counts as zero.
        """
        self._watch.abandon()
        if self.training:
            self._spread_buffers()
        self._watch.pass_without_backward()

    def close(self) -> None:
        """Take the hooks off: the module is an ordinary one again."""
        self._watch.close()

    def _pass_ended(self, order: list[int]) -> None:
        """After the first step, build the buckets again in the order in which gradients became ready on one rank."""
        if self._order_known:
            return
        slots = range(len(self._parameters_averaged))
        seen = set(order)
        whole = order + [slot for slot in reversed(slots) if slot not in seen]
        agreed = torch.tensor(whole, device=self._parameters_averaged[0].device)
        dist.broadcast(agreed, group=self.group, group_src=self._source)
        self._watch.buckets = self._plan(agreed.tolist())
        self._order_known = True

    def _plan(self, order: Iterable[int]) -> list[GradientBucket]:
        weights = self._parameters_averaged
        plan = plan_buckets(weights, list(order), *self._bucket_sizes)
        return [GradientBucket(slots, weights, self.group) for slots in plan]

    def _spread_buffers(self) -> None:
        if self.broadcast_buffers:
            self._spread(list(self.module.buffers()))

    @torch.no_grad()
    def _spread(self, tensors: list[Tensor]) -> None:
        """Make these equal to those of the source rank: one broadcast per dtype and device."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
        for alike in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            dist.broadcast(flat, group=self.group, group_src=self._source)
            for tensor, piece in zip(alike, torch.split(flat, [tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(piece.view(tensor.shape))

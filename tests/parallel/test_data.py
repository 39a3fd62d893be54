"""Every function named on_ranks_* runs in each rank; the reference is one process on the whole batch."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.models import Branches, Tied, assert_close, gradients, mlp, rows
from ranks import RankFailure, ranks
from unisono.errors import MismatchError, UsageError
from unisono.parallel.data import DistributedDataParallel, mean_count
from unisono.parallel.pipeline import clip_grad_norm_

BACKENDS = ("unisono", "gloo")


def squares(out: Tensor) -> Tensor:
    return out.pow(2).sum(-1)


def same_on_all(model: nn.Module) -> bool:
    """Whether all ranks hold the same bits of all parameters and buffers."""
    return _alike([*model.parameters(), *model.buffers()])


def same_on_all_gradients(model: nn.Module) -> bool:
    return _alike([weight.grad for weight in model.parameters() if weight.grad is not None])


def _alike(tensors: list[Tensor]) -> bool:
    flat = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])
    everywhere = flat.new_empty(dist.get_world_size(), flat.numel())
    dist.all_gather_into_tensor(everywhere.view(-1), flat)
    return bool((everywhere == everywhere[0]).all())


def on_ranks_plain_loop(rank: int, world_size: int, parallel: bool, steps: int) -> list[float]:
    """AdamW after the tutorial's loop or after DistributedDataParallel: every weight of every step, as floats."""
    net = mlp()
    model = DistributedDataParallel(net, bucket_nbytes=200, first_bucket_nbytes=50) if parallel else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    trace = []
    for step in range(steps):
        optimizer.zero_grad()
        squares(model(rows(4, seed=10 * step + rank))).mean().backward()
        if not parallel:
            for weight in net.parameters():
                dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        trace += torch.cat([weight.detach().flatten() for weight in net.parameters()]).tolist()
    return trace


def test_bit_for_bit_the_tutorials_loop() -> None:
    by_hand = ranks(2).run(on_ranks_plain_loop, False, 6)
    assert ranks(2).run(on_ranks_plain_loop, True, 6) == by_hand
    assert by_hand[0] == by_hand[1]


def on_ranks_values(rank: int, world_size: int) -> None:
    """Every way to use it, one after the other, each against one process."""
    for sizes in ((1 << 20, 1 << 20), (100, 1), (1, 1)):
        _mean_of_equal_batches(rank, world_size, sizes)
    _tied(rank, world_size)
    _accumulation(rank, world_size)
    _unused(rank, world_size)
    _low_precision(rank, world_size)
    _weights_and_buffers_of_rank_0(rank, world_size)
    _tokens(rank, world_size)
    for counted in (False, True):
        _out_of_data(rank, world_size, counted)
    _out_of_data_and_accumulating(rank, world_size)
    _clipping(rank, world_size)
    _frozen_and_closed(rank, world_size)


def _mean_of_equal_batches(rank: int, world_size: int, sizes: tuple[int, int]) -> None:
    model, alone = DistributedDataParallel(mlp(), bucket_nbytes=sizes[0], first_bucket_nbytes=sizes[1]), mlp()
    for step in range(3):  # the first builds the buckets again
        for set_to_none in (True, False):
            model.zero_grad(set_to_none)
            alone.zero_grad(set_to_none)
            whole = rows(4 * world_size, seed=step)
            squares(model(whole[4 * rank : 4 * rank + 4])).mean().backward()
            squares(alone(whole)).mean().backward()
            assert_close(gradients(model.module), gradients(alone))
    squares(model(whole[4 * rank : 4 * rank + 4])).mean().backward()  # without zero_grad: added to the mean
    squares(alone(whole)).mean().backward()
    assert_close(gradients(model.module), gradients(alone))


def _tied(rank: int, world_size: int) -> None:
    torch.manual_seed(3)
    net, alone = Tied(), Tied()
    alone.load_state_dict(net.state_dict())
    model = DistributedDataParallel(net, first_bucket_nbytes=1, bucket_nbytes=40)
    tokens = torch.arange(2 * world_size) % 7
    for _ in range(2):
        model.zero_grad()
        alone.zero_grad()
        F.cross_entropy(model(tokens[2 * rank : 2 * rank + 2]), tokens[2 * rank : 2 * rank + 2]).backward()
        F.cross_entropy(alone(tokens), tokens).backward()
        assert_close(gradients(net), gradients(alone))
        assert net.head.weight.grad is net.embedding.weight.grad


def _accumulation(rank: int, world_size: int) -> None:
    model, alone = DistributedDataParallel(mlp(), bucket_nbytes=100), mlp()
    for step in range(2):
        model.zero_grad()
        alone.zero_grad()
        whole = rows(6 * world_size, seed=20 + step).view(3, world_size, 2, 5)
        for microbatch in range(3):
            with model.no_sync() if microbatch < 2 else nullcontext():
                squares(model(whole[microbatch, rank])).mean().div(3).backward()
            if microbatch < 2:
                assert not same_on_all_gradients(model)
        squares(alone(whole.view(-1, 5))).mean().backward()
        assert_close(gradients(model.module), gradients(alone))
        assert same_on_all_gradients(model)


def _unused(rank: int, world_size: int) -> None:
    """Rank 0 goes left, the others right; in a second step all go right, in a third all left and right in turn."""
    torch.manual_seed(5)
    net, alone = Branches(), Branches()
    alone.load_state_dict(net.state_dict())
    model = DistributedDataParallel(net, bucket_nbytes=30, first_bucket_nbytes=1)
    for ways in (["left"] + ["right"] * 9, ["right"] * 10, ["left right"] * 10, ["right"] * 9 + ["left"]):
        model.zero_grad()
        alone.zero_grad()
        model(rows(2, 3, seed=rank), ways[rank]).sum().backward()
        for peer in range(world_size):
            (alone(rows(2, 3, seed=peer), ways[peer]).sum() / world_size).backward()
        assert_close(gradients(net), gradients(alone))
    model.zero_grad()
    alone.zero_grad()
    with model.no_sync():  # right is used in the part that is not averaged at once
        model(rows(2, 3, seed=rank), "right").sum().backward()
    model(rows(2, 3, seed=rank), "left").sum().backward()
    for peer in range(world_size):
        for way in ("right", "left"):
            (alone(rows(2, 3, seed=peer), way).sum() / world_size).backward()
    assert_close(gradients(net), gradients(alone))


def _low_precision(rank: int, world_size: int) -> None:
    net = nn.ModuleList([nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).double()])
    net.forward = lambda x: net[1](net[0](x.bfloat16()).double())  # type: ignore[method-assign]
    model = DistributedDataParallel(net)
    model(rows(3, 4, seed=rank)).sum().backward()
    assert net[0].weight.grad.dtype == torch.bfloat16
    assert net[1].bias.grad.tolist() == [3.0] * 4
    assert same_on_all_gradients(net[0])


def _weights_and_buffers_of_rank_0(rank: int, world_size: int) -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        net[0].weight += rank
    model = DistributedDataParallel(net)
    assert same_on_all(net)
    model(rows(3, seed=rank))
    assert not same_on_all(net)
    assert net[1].num_batches_tracked == 1
    model.eval()
    if rank == 0:  # no call of the other ranks is needed to evaluate
        model(rows(3))
    model.train()
    mean_of_0 = net[1].running_mean.clone()
    dist.broadcast(mean_of_0, 0)
    net[1].momentum = 0.0
    model(rows(3, seed=rank))
    assert torch.equal(net[1].running_mean, mean_of_0)


def _tokens(rank: int, world_size: int) -> None:
    """Rank r holds 2r + 1 rows: the mean of all, and not the mean of means."""
    model, alone = DistributedDataParallel(mlp()), mlp()
    held = [rows(2 * peer + 1, seed=peer) for peer in range(world_size)]
    mean = mean_count(len(held[rank]))
    assert mean == sum(map(len, held)) / world_size
    (squares(model(held[rank])).sum() / mean).backward()
    squares(alone(torch.cat(held))).mean().backward()
    assert_close(gradients(model.module), gradients(alone))
    for counts, words in ((-1.0, "rank 0 of the group counts -1"), (0.0, "all .* ranks count 0")):
        with pytest.raises(UsageError, match=words):
            mean_count(counts)


def _out_of_data(rank: int, world_size: int, counted: bool) -> None:
    """The last rank has the most batches, rank 0 has none; weights and buffers stay equal on all of them."""
    net, alone = mlp(), mlp()
    batches = [[rows(1 + step, seed=10 * peer + step) for step in range(peer)] for peer in range(world_size)]
    model = DistributedDataParallel(net, bucket_nbytes=64)
    fast, slow = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, alone))
    steps = 0
    for batch in model.join(batches[rank], len if counted else None):
        fast.zero_grad()
        slow.zero_grad()
        if batch is None:
            model.skip()
        else:
            loss = squares(model(batch))
            (loss.sum() / model.mean_count if counted else loss.mean()).backward()
        whole = [held[steps] for held in batches if len(held) > steps]
        squares(alone(torch.cat(whole))).mean().backward()  # all ranks' batches of one step have the same length
        assert_close(gradients(net), gradients(alone))
        fast.step()
        slow.step()
        steps += 1
    assert steps == world_size - 1
    assert same_on_all(net)


def _out_of_data_and_accumulating(rank: int, world_size: int) -> None:
    """Without zero_grad the means of the steps add up, also on and after ranks that have no more data."""
    model, alone = DistributedDataParallel(mlp(), bucket_nbytes=64), mlp()
    batches = [[rows(2, seed=10 * peer + step) for step in range(peer + 1)] for peer in range(world_size)]
    for step, batch in enumerate(model.join(batches[rank])):
        if batch is None:
            model.skip()
        else:
            squares(model(batch)).mean().backward()
        squares(alone(torch.cat([held[step] for held in batches if len(held) > step]))).mean().backward()
        assert_close(gradients(model.module), gradients(alone))


def _clipping(rank: int, world_size: int) -> None:
    """Of gradients that every rank holds by torch's own; of parts, as the stages of a pipeline, by the norm of all."""
    model, alone = DistributedDataParallel(mlp()), mlp()
    whole = rows(2 * world_size)
    squares(model(whole[2 * rank : 2 * rank + 2])).mean().backward()
    squares(alone(whole)).mean().backward()
    norm, wanted = (nn.utils.clip_grad_norm_(net.parameters(), 0.5) for net in (model, alone))
    torch.testing.assert_close(norm, wanted)
    assert_close(gradients(model.module), gradients(alone))
    own = [weight for number, weight in enumerate(model.parameters()) if number % world_size == rank]
    for max_norm in (0.1, 1e6):
        wanted = nn.utils.clip_grad_norm_(alone.parameters(), max_norm)
        torch.testing.assert_close(clip_grad_norm_(own, max_norm), wanted)
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            if any(mine is weight for weight in own):
                torch.testing.assert_close(mine.grad, other.grad)
    assert clip_grad_norm_([], 1.0, dist.group.WORLD) == 0
    with pytest.raises(UsageError, match="max_norm is 0"):
        clip_grad_norm_(own, 0)


def _frozen_and_closed(rank: int, world_size: int) -> None:
    net = mlp()
    net[0].weight.requires_grad_(False)
    model = DistributedDataParallel(net)
    squares(model(rows(2, seed=rank))).mean().backward()
    assert net[0].weight.grad is None
    assert same_on_all_gradients(model)
    model.close()
    model.zero_grad()
    squares(net(rows(2, seed=rank))).mean().backward()
    assert not same_on_all_gradients(model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_one_process(backend: str) -> None:
    ranks(3, backend=backend).run(on_ranks_values)


def on_ranks_group(rank: int, world_size: int) -> list[float]:
    """Two groups of two, each with its own model."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False), groups[rank % 2])
    (model(torch.tensor([[float(rank)]])).sum()).backward()
    mean = mean_count(rank, groups[rank % 2])
    for group in groups:
        if rank in dist.get_process_group_ranks(group):
            dist.destroy_process_group(group)
    return [model.module.weight.grad.item(), mean]


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_of_some_ranks(backend: str) -> None:
    assert ranks(4, backend=backend).run(on_ranks_group) == [[1, 1], [2, 2]] * 2


def on_ranks_order(rank: int, world_size: int) -> Any:
    """Layers are called against the order of their registration, and differently on the ranks."""

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.middle, self.first = (nn.Linear(2, 2, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            layers = [self.first, self.middle, self.last]
            return nn.Sequential(*layers if rank == 0 else layers[::-1])(x)

    model = DistributedDataParallel(Crossed(), bucket_nbytes=16, first_bucket_nbytes=16)
    before = [bucket.slots for bucket in model._watch.buckets]
    model(torch.ones(1, 2)).sum().backward()
    after = [bucket.slots for bucket in model._watch.buckets]
    model(torch.ones(1, 2)).sum().backward()
    return before, after, [bucket.slots for bucket in model._watch.buckets], same_on_all_gradients(model)


def test_buckets_follow_the_order_that_rank_0_saw() -> None:
    before, after = [(2,), (1,), (0,)], [(0,), (1,), (2,)]
    assert ranks(2).run(on_ranks_order) == [(before, after, after, True)] * 2


def on_ranks_overlap(rank: int, world_size: int) -> list[str]:
    """What happens in which order in a backward pass: a bucket starts before earlier layers have their gradients."""
    events: list[str] = []
    net = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
    model = DistributedDataParallel(net, bucket_nbytes=64, first_bucket_nbytes=64)
    for number, layer in enumerate(net):
        layer.weight.register_post_accumulate_grad_hook(lambda _, n=number: events.append(f"gradient {n}"))
    for number, bucket in enumerate(model._watch.buckets):
        start, finish = bucket.start, bucket.finish
        bucket.start = lambda t, s=start, n=number: (events.append(f"start {n}"), s(t))
        bucket.finish = lambda p, f=finish, n=number: (events.append(f"wait {n}"), f(p))
    model(torch.ones(1, 4)).sum().backward()
    return events


def test_buckets_start_while_backward_runs() -> None:
    wanted = ["start 0", "gradient 2", "start 1", "gradient 1", "start 2", "gradient 0", "wait 0", "wait 1", "wait 2"]
    assert ranks(2).run(on_ranks_overlap) == [wanted] * 2


def on_ranks_errors(rank: int, world_size: int) -> None:
    with pytest.raises(MismatchError, match=r"first in 'bias' \(no\. 1; the ranks hold 2, 1, 2 of them\): "):
        DistributedDataParallel(nn.Linear(2, 2, bias=rank != 1))
    with pytest.raises(MismatchError, match=r"rank 0: '0.weight' float32 \[2, 3\]; ranks 1, 2: '0.weight' float32 \[4"):
        DistributedDataParallel(nn.Sequential(nn.Linear(3, 4 if rank else 2)))
    with pytest.raises(UsageError, match="no parameter that takes a gradient"):
        DistributedDataParallel(nn.ReLU())
    model = DistributedDataParallel(nn.Embedding(3, 2, sparse=True))
    with pytest.raises(UsageError, match="sparse=False"):
        model(torch.tensor([1])).sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_are_on_every_rank(backend: str) -> None:
    ranks(3, backend=backend).run(on_ranks_errors)


def on_ranks_cut_short(rank: int, world_size: int) -> list[float]:
    """An exception in every rank's backward; the next step is right again."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    model = DistributedDataParallel(net, bucket_nbytes=1, first_bucket_nbytes=1)
    with torch.no_grad():
        for weight in net.parameters():
            weight.fill_(1)
    out = net[0](torch.ones(1, 1))
    out.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        net[1](out).sum().backward()
    model.zero_grad()
    model(torch.full((1, 1), float(rank))).sum().backward()
    return [weight.grad.item() for weight in net.parameters()]


def test_a_pass_that_failed_on_all_ranks_leaves_nothing_behind() -> None:
    assert ranks(2).run(on_ranks_cut_short) == [[0.5, 0.5]] * 2


def on_ranks_fail(rank: int, world_size: int) -> None:
    DistributedDataParallel(nn.Linear(2, 1 + rank))


def test_the_error_reaches_the_user_as_it_is() -> None:
    with pytest.raises(RankFailure, match="MismatchError"):
        ranks(2).run(on_ranks_fail)

"""Optimizer states, gradients and parameters cut over the ranks: weights and states against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallel.models import Branches, Tied, mlp, rows
from ranks import ranks
from unisono.errors import MismatchError, UsageError
from unisono.parallel.checkpoint import full_state, load_checkpoint, save_checkpoint
from unisono.parallel.data import DataParallel
from unisono.parallel.sharded import ShardedOptimizer, shard_parameters

BACKENDS = ("unisono", "gloo")
KINDS = {
    torch.optim.AdamW: {"lr": 0.01},
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9},
    torch.optim.Adagrad: {"lr": 0.1},
    torch.optim.NAdam: {"lr": 0.01},
    torch.optim.ASGD: {"lr": 0.1},
}


def squares(out: Tensor) -> Tensor:
    return out.pow(2).sum(-1).mean()


def near(got: nn.Module, wanted: nn.Module) -> None:
    for (name, mine), other in zip(got.named_parameters(), wanted.parameters(), strict=True):
        mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def near_states(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got["state"].keys() == wanted["state"].keys()
    for key, state in wanted["state"].items():
        assert got["state"][key].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(got["state"][key][name], value, rtol=1e-4, atol=1e-5)
    assert got["param_groups"] == wanted["param_groups"]


def train(model: nn.Module, optimizer: Any, steps: range, share: slice = slice(None), clip: float = 0.0) -> None:
    """Some steps on this share of the 6 rows of each."""
    for step in steps:
        optimizer.zero_grad()
        squares(model(rows(6, seed=step)[share])).backward()
        if clip and isinstance(optimizer, ShardedOptimizer):
            optimizer.clip_grad_norm(clip)
        elif clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def grouped(net: nn.Sequential) -> list[dict[str, Any]]:
    weights = [weight for weight in net.parameters() if weight.dim() == 2]
    biases = [bias for bias in net.parameters() if bias.dim() == 1]
    return [{"params": weights, "lr": 0.02}, {"params": biases}]


def on_ranks_optimizers(rank: int, world_size: int) -> None:
    share = slice(6 // world_size * rank, 6 // world_size * (rank + 1))
    for number, (kind, options) in enumerate(KINDS.items()):
        for whole_gradients in (False, True):
            net, alone = mlp(rank), mlp()  # rank 0's weights are everybody's
            model = DataParallel(net) if whole_gradients else net
            optimizer = ShardedOptimizer(
                grouped(net),
                kind,
                shard_gradients=not whole_gradients,
                bucket_nbytes=1 if number == 0 else 150,
                **options,
            )
            reference = kind(grouped(alone), **options)
            clip = 0.5 if kind is torch.optim.AdamW else 0.0
            train(model, optimizer, range(3), share, clip)
            train(alone, reference, range(3), clip=clip)
            near(net, alone)
            full = optimizer.full_state_dict()
            near_states(full, reference.state_dict())
            _from_full(full, alone, kind, options)
            if not whole_gradients:
                optimizer.close()
    _memory(rank, world_size)
    _accumulated(rank, world_size)
    _tied_unused_and_channels_last(rank, world_size)
    _cut_short()
    _errors(rank)


def _from_full(full: dict[str, Any], alone: nn.Module, kind: Any, options: dict[str, Any]) -> None:
    """A full state goes into one process's optimizer, and from there into a sharded one."""
    single = kind(grouped(alone), **options)
    single.load_state_dict(full)
    again = ShardedOptimizer(grouped(mlp()), kind, bucket_nbytes=90, **options)
    again.load_full_state_dict(single.state_dict())
    near_states(again.full_state_dict(), full)
    again.close()


def _memory(rank: int, world_size: int) -> None:
    """States and gradients of a rank are its part, plus padding of less than an element per rank and bucket."""
    net = nn.Linear(99, 7)
    optimizer = ShardedOptimizer(net.parameters(), torch.optim.Adam, lr=0.1)
    squares(net(rows(2, 99))).backward()
    assert all(weight.grad is None for weight in net.parameters())
    part = -(-700 // world_size)
    assert [shard.mine.grad.numel() for shard in optimizer.shards] == [part]
    assert [shard.gradients for shard in optimizer.shards] == [None]
    optimizer.step()
    held = sum(value.numel() for state in optimizer.optimizer.state.values() for value in state.values())
    assert held == 2 * part + 1


def _accumulated(rank: int, world_size: int) -> None:
    """Three microbatches, whole on the rank or reduced one by one: the same as at once."""
    for reduce_each in (False, True):
        net, alone = mlp(), mlp()
        optimizer = ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            whole = rows(3 * world_size, seed=step).view(3, world_size, 5)
            for microbatch in range(2):
                if reduce_each:
                    squares(net(whole[microbatch, rank : rank + 1])).div(3).backward()
                else:
                    with optimizer.no_sync():
                        squares(net(whole[microbatch, rank : rank + 1])).div(3).backward()
            squares(net(whole[2, rank : rank + 1])).div(3).backward()
            optimizer.step()
            alone.zero_grad()
            squares(alone(whole.view(-1, 5))).backward()
            torch.optim.SGD(alone.parameters(), lr=0.1).step()
        near(net, alone)


def _tied_unused_and_channels_last(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    tied, branches, conv = Tied(), Branches(), nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    inputs = (torch.arange(7), (rows(2, 3), "left"), rows(2, 48).view(2, 3, 4, 4))
    for net, given in zip((tied, branches, conv), inputs, strict=True):
        before = {name: weight.detach().clone() for name, weight in net.named_parameters()}
        optimizer = ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
        squares(net(*given) if isinstance(given, tuple) else net(given)).backward()
        optimizer.step()
        after = {name: weight.detach().clone() for name, weight in net.named_parameters()}
        alone = type(net)() if net is not conv else nn.Conv2d(3, 4, 2)
        alone.load_state_dict({**before, "head.weight": before["embedding.weight"]} if net is tied else before)
        squares(alone(*given) if isinstance(given, tuple) else alone(given)).backward()
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
        near(net, alone)
        assert before.keys() == after.keys()
    assert torch.equal(after["weight"], conv.weight)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert tied.head.weight is tied.embedding.weight


def _cut_short() -> None:
    """An exception in every rank's backward; after zero_grad the next step is right again."""
    net, alone = mlp(), mlp()
    optimizer = ShardedOptimizer(net.parameters(), torch.optim.SGD, lr=0.1, bucket_nbytes=64)
    hidden = net[0](rows(2))
    hidden.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        squares(net[1:](hidden)).backward()
    train(net, optimizer, range(1))
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), range(1))
    near(net, alone)


def _errors(rank: int) -> None:
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(UsageError, match="1 of 2 parameters are given twice: name a tied weight once"):
        ShardedOptimizer([{"params": [weight], "lr": 0.1}, {"params": [weight]}], torch.optim.SGD, lr=0.2)
    for kind in (torch.optim.LBFGS, type("Mine", (torch.optim.LBFGS,), {})):
        with pytest.raises(UsageError, match=f"{kind.__name__} looks at whole matrices"):
            ShardedOptimizer(mlp().parameters(), kind)
    with pytest.raises(UsageError, match="no parameter takes a gradient"):
        ShardedOptimizer([], torch.optim.SGD, lr=0.1)
    with pytest.raises(
        MismatchError, match=r"first in '0'.*rank 0: '0' float32 \[2, 3\]; rank.* 1.*: '0' float32 \[4, 3"
    ):
        ShardedOptimizer(nn.Linear(3, 4 if rank else 2).parameters(), torch.optim.SGD, lr=0.1)
    optimizer = ShardedOptimizer(mlp().parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(UsageError, match=r"groups of \[2\] parameters, expected \[6\]"):
        optimizer.load_full_state_dict(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).state_dict())
    other = ShardedOptimizer(mlp().parameters(), torch.optim.SGD, bucket_nbytes=1, lr=0.1)
    with pytest.raises(UsageError, match="6 buckets of other parameters than the 1 here"):
        optimizer.load_state_dict(other.state_dict())
    with pytest.raises(UsageError, match="no submodule is a"):
        shard_parameters(mlp(), nn.Conv2d)


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_and_gradients_cut_over_the_ranks(backend: str) -> None:
    ranks(2, backend=backend).run(on_ranks_optimizers)


def test_three_ranks() -> None:
    ranks(3).run(on_ranks_optimizers)


def build(sharded: bool, seed: int) -> tuple[nn.Module, Any]:
    net = mlp(seed)
    if sharded:
        shard_parameters(net, nn.Linear)
        return net, torch.optim.AdamW(net.parameters(), lr=0.01)
    return net, ShardedOptimizer(net.parameters(), torch.optim.AdamW, bucket_nbytes=100, lr=0.01)


def on_ranks_save(rank: int, world_size: int, folder: Path, parameters_too: bool) -> None:
    net, optimizer = build(parameters_too, 0)
    share = slice(3 * rank, 3 * rank + 3)
    train(net, optimizer, range(3), share)
    alone = mlp()
    train(alone, torch.optim.AdamW(alone.parameters(), lr=0.01), range(3))
    near(net, alone)
    save_checkpoint(folder, net, optimizer)


def on_ranks_load(rank: int, world_size: int, folder: Path, parameters_too: bool) -> None:
    """Go on with another number of ranks, as if nothing had happened."""
    net, optimizer = build(parameters_too, 7)
    load_checkpoint(folder, net, optimizer)
    alone = mlp()
    reference = torch.optim.AdamW(alone.parameters(), lr=0.01)
    train(alone, reference, range(3))
    near(net, alone)
    share = slice(6 // world_size * rank, 6 // world_size * (rank + 1))
    train(net, optimizer, range(3, 5), share)
    train(alone, reference, range(3, 5))
    near(net, alone)
    model, states = full_state(net, optimizer)
    for name, weight in alone.state_dict().items():
        torch.testing.assert_close(model[name], weight, rtol=1e-4, atol=1e-5)
    moment = states["state"]["0.weight" if parameters_too else 0]["exp_avg"]
    torch.testing.assert_close(moment, reference.state_dict()["state"][0]["exp_avg"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parameters_too", [False, True], ids=["optimizer", "fsdp"])
def test_a_checkpoint_of_two_ranks_loads_on_three(backend: str, parameters_too: bool, tmp_path: Path) -> None:
    ranks(2, backend=backend).run(on_ranks_save, tmp_path, parameters_too)
    ranks(3, backend=backend).run(on_ranks_load, tmp_path, parameters_too)


def on_ranks_before_the_first_step(rank: int, world_size: int, folder: Path) -> None:
    """A checkpoint written before the first step, and the program that wrote it, go on as if it had not been."""
    with pytest.raises(UsageError, match="there is no checkpoint in"):
        load_checkpoint(folder / "none", *build(False, 0))
    for parameters_too in (False, True):
        first, later = build(parameters_too, 0), build(parameters_too, 7)
        train(*later, range(2))
        save_checkpoint(folder / str(parameters_too), *first)
        load_checkpoint(folder / str(parameters_too), *later)
        assert full_state(*first)[1]["state"] == full_state(*later)[1]["state"] == {}
        alone = mlp()
        train(alone, torch.optim.AdamW(alone.parameters(), lr=0.01), range(2))
        for net, optimizer in (first, later):
            train(net, optimizer, range(2))
            near(net, alone)
    plain, other = mlp(0), mlp(7)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.2)
    save_checkpoint(folder / "plain", plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    load_checkpoint(folder / "plain", other, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_checkpoint_before_the_first_step(tmp_path: Path) -> None:
    ranks(2).run(on_ranks_before_the_first_step, tmp_path)


def on_ranks_subgroup(rank: int, world_size: int) -> bool:
    """Only ranks 1 and 2 train, in a group of their own, and save a state with padding."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return True
    net, alone = mlp(), mlp()
    optimizer = ShardedOptimizer(net.parameters(), torch.optim.SGD, group, lr=0.1, momentum=0.9)
    share = slice(3 * (rank - 1), 3 * rank)
    train(net, optimizer, range(2), share, clip=0.3)
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), range(2), clip=0.3)
    near(net, alone)
    kept = optimizer.state_dict()
    again = ShardedOptimizer(mlp().parameters(), torch.optim.SGD, group, lr=0.5)
    again.load_state_dict(kept)
    same = all(
        torch.equal(a, b)
        for one, other in zip(optimizer.optimizer.state.values(), again.optimizer.state.values(), strict=True)
        for a, b in zip(one.values(), other.values(), strict=True)
    )
    dist.destroy_process_group(group)
    return same and again.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_of_some_ranks(backend: str) -> None:
    assert ranks(3, backend=backend).run(on_ranks_subgroup) == [True] * 3

"""Bytes that a rank keeps, against what is counted by hand."""

import pytest
import torch
import torch.nn.functional as F

from parallel.mesh_models import adam, batches, end, whole
from ranks import ranks
from unisono.parallel.mesh import (
    ActivationMeter,
    MemoryUse,
    MeshTransformer,
    ParallelDims,
    Transformer,
    memory_use,
)


def test_what_autograd_keeps_is_counted_once_and_let_go() -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    x = torch.ones(10, 8)
    with ActivationMeter([weight]) as meter:
        first = x @ weight  # keeps x; the weight is apart
        assert meter.nbytes == x.nbytes
        second = x @ weight  # x again
        assert meter.nbytes == x.nbytes
        third = first.exp()  # keeps its result
        assert meter.nbytes == 2 * x.nbytes
        third.sum().backward()
        assert meter.nbytes == x.nbytes
        second.sum().backward()
        del first, second, third
    assert (meter.nbytes, meter.peak) == (0, 2 * x.nbytes)
    with ActivationMeter() as all_counted:
        y = x.requires_grad_() @ weight
    assert all_counted.peak == x.nbytes + weight.nbytes
    y.exp()
    assert all_counted.peak == x.nbytes + weight.nbytes


def test_weights_gradients_and_optimizer_states() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    assert memory_use(model.parameters(), optimizer, 7) == MemoryUse(32, 32, 0, 7)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    use = memory_use(model.parameters(), optimizer, 7)
    assert use == MemoryUse(32, 32, 2 * 32 + 2 * 4, 7)  # two moments for each weight, a step count for each tensor
    assert use.total == 32 + 32 + 72 + 7


def plain_activations(model: Transformer, rows: int) -> int:
    """Those of one process and one microbatch."""
    windows = batches()[0][:rows]
    with ActivationMeter(model.parameters()) as meter:
        F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()).backward()
    assert meter.nbytes == 0
    return meter.peak


def on_ranks_measure(rank: int, world_size: int, cases: list[tuple[ParallelDims, str]]) -> list[MemoryUse]:
    found = []
    for shape, schedule in cases:
        mesh = shape.build_mesh()
        model = MeshTransformer(whole(2), mesh, schedule=schedule, microbatches=4)
        optimizer = adam(model.parameters())
        with ActivationMeter(model.parameters()) as meter:
            model.step(batches()[0][:8])
        optimizer.step()
        found.append(memory_use(model.parameters(), optimizer, meter.peak))
        assert meter.nbytes == 0
        end(mesh)
    return found


def test_each_axis_saves_what_it_splits() -> None:
    cases = [
        (ParallelDims(dp=2), "1f1b"),
        (ParallelDims(tp=2), "1f1b"),
        (ParallelDims(pp=2), "1f1b"),
        (ParallelDims(pp=2), "gpipe"),
    ]
    found = ranks(2).run(on_ranks_measure, cases)
    dp, tp, pp, gpipe = (tuple(uses) for uses in zip(*found, strict=True))
    model = whole(2)
    everything = sum(weight.nbytes for weight in model.parameters())
    norms = sum(weight.nbytes for weight in model.parameters() if weight.dim() == 1)
    assert [use.parameters for use in dp] == [everything, everything]
    assert sum(use.parameters for use in tp) == everything + norms
    assert sum(use.parameters for use in pp) == everything + model.embedding.weight.nbytes
    assert tp[0].activations < plain_activations(model, rows=2)
    assert dp[0].activations <= plain_activations(model, rows=1)
    # Of four microbatches, the first stage of 1F1B keeps two at a time, GPipe all; the last stage one.
    assert gpipe[0].activations == pytest.approx(2 * pp[0].activations, rel=0.01)  # tables of angles are kept once
    assert gpipe[1].activations > 3 * pp[1].activations

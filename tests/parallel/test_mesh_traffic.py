"""The traffic of each axis against what is counted by hand."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from parallel.mesh_models import CONTEXT, VOCABULARY, batches, end, whole
from ranks import ranks
from unisono.parallel.mesh import CommunicationMeter, MeshTransformer, ParallelDims
from unisono.parallel.tensor import ParallelMLP

WIDTH, ROWS, LAYERS = 16, 8, 2
Counts = dict[str, tuple[int, int]]


def on_ranks_count(rank: int, world_size: int, shape: ParallelDims) -> Counts:
    """Calls and bytes of the second step, in two microbatches; the first also agrees on shapes."""
    mesh = shape.build_mesh()
    model = MeshTransformer(whole(LAYERS), mesh, microbatches=2)
    windows = batches()[0][:ROWS]
    model.step(windows)
    before = dist.all_reduce
    with CommunicationMeter(mesh) as meter:
        model.step(windows)
        dist.all_reduce(torch.ones(1), group=dist.new_group())  # of a group that has no name here
    assert dist.all_reduce is before
    assert all(traffic.seconds > 0 for traffic in meter.traffic.values())
    end(mesh)
    return {axis: (traffic.calls, traffic.nbytes) for axis, traffic in meter.traffic.items()}


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_data_and_tensor_parallel(backend: str) -> None:
    found = ranks(4, backend=backend).run(on_ranks_count, ParallelDims(dp=2, tp=2))
    positions = ROWS // 2 // 2 * CONTEXT  # of a microbatch on one of two dp ranks
    # Twice in each layer, forward and backward, and once at either end: a sum of activations. Then cross-entropy: the
    # maximum, and two sums.
    calls = 2 * (4 * LAYERS + 2 + 2)
    nbytes = 2 * 4 * positions * ((4 * LAYERS + 2) * WIDTH + 1 + 2)
    for rank, counts in enumerate(found):
        assert counts["tp"] == (calls, nbytes)
        vocabulary = (VOCABULARY + 1 - rank % 2) // 2
        parameters = vocabulary * WIDTH + LAYERS * (12 * WIDTH * WIDTH // 2 + 2 * WIDTH) + WIDTH
        assert counts["dp"] == (2, 4 * (parameters + 1))  # the gradients, and the loss


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_pipeline_and_sequence(backend: str) -> None:
    found = ranks(4, backend=backend).run(on_ranks_count, ParallelDims(pp=2, sp=2))
    for rank, counts in enumerate(found):
        # Each microbatch's activations go one way and their gradients the other; the tied weight's gradients go both
        # ways; two small calls ask whether shapes are as before (int64) and put the loss together.
        positions = (5, 4)[rank % 2]
        nbytes = 4 * WIDTH * (2 * ROWS * positions + 2 * VOCABULARY) + 8 + 4
        assert counts["pp"] == (2 * 2 + 2 + 2, nbytes)
        # Keys and values go round forward and backward, their gradients go round and home; gradients, loss.
        assert counts["sp"][0] == 2 * 2 * 4 * LAYERS // 2 + 2


def on_ranks_both(rank: int, world_size: int) -> tuple[int, int]:
    """Calls of a tensor parallel layer, forward and backward, by torch's mode and by the meter."""
    mesh = ParallelDims(dp=2, tp=2).build_mesh()
    mlp = ParallelMLP(nn.Linear(4, 8), nn.Linear(8, 4), group=mesh.get_group("tp"))
    with CommunicationMeter(mesh) as meter, CommDebugMode() as torchs:
        mlp(torch.ones(3, 4, requires_grad=True)).sum().backward()
    end(mesh)
    return torchs.get_total_counts(), meter.traffic["tp"].calls


def test_torch_counts_the_same_calls_where_it_sees_them() -> None:
    assert ranks(4, backend="gloo").run(on_ranks_both) == [(2, 2)] * 4
    assert ranks(4).run(on_ranks_both) == [(0, 2)] * 4  # it sees nothing of a backend written in Python

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel.models import mlp
from ranks import ranks
from unisono.errors import MismatchError
from unisono.parallel.data import assert_replicas_equal


def on_ranks(rank: int, world_size: int) -> None:
    net = nn.Sequential(mlp(), nn.BatchNorm1d(3))
    assert_replicas_equal(net)
    with torch.no_grad():
        net[0][2].bias[1] = -0.0 if rank == 1 else 0.0  # equal, but not in bits
        net[0][4].weight += rank
    words = r"first in '0.2.bias' \(no. 3; .*\): ranks 0, 2: '0.2.bias' float32 \[6\] with bits \w{8}; rank 1: "
    with pytest.raises(MismatchError, match=words):
        assert_replicas_equal(net)
    net = nn.BatchNorm1d(3)
    net.running_var += rank
    assert_replicas_equal(net)
    with pytest.raises(MismatchError, match="first in 'running_var'"):
        assert_replicas_equal(net, buffers=True)
    with pytest.raises(
        MismatchError, match=r"rank 0: 'weight' float32 \[3, 2\]; ranks 1, 2: 'weight' float32 \[3, 2\] s"
    ):
        assert_replicas_equal(_layout(rank))
    with pytest.raises(
        MismatchError, match=r"first in 'extra' \(no. 2; the ranks hold 2, 2, 3 of them\): ranks 0, 1: no"
    ):
        assert_replicas_equal(_extra(rank == 2))
    group = dist.new_group([1, 2])
    if rank:
        with pytest.raises(MismatchError, match=r"rank 1: .*; rank 2: .*same seed"):
            assert_replicas_equal(mlp(seed=rank), group)
        dist.destroy_process_group(group)


def _layout(rank: int) -> nn.Module:
    net = nn.Linear(2, 3)
    if rank:
        net.weight = nn.Parameter(torch.zeros(2, 3).t())
    return net


def _extra(there: bool) -> nn.Module:
    net = nn.Linear(2, 3)
    if there:
        net.extra = nn.Parameter(torch.zeros(1))
    torch.nn.init.zeros_(net.weight)
    torch.nn.init.zeros_(net.bias)
    return net


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_the_first_parameter_that_differs_is_named(backend: str) -> None:
    ranks(3, backend=backend).run(on_ranks)

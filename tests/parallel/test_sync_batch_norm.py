"""Against nn.BatchNorm in one process on the rows of all ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ranks import ranks
from unisono.errors import UsageError
from unisono.parallel.data import SyncBatchNorm

PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def _case(
    rank: int, held: list[int], tail: list[int], dtype: torch.dtype, shift: float, kind: type = SyncBatchNorm, **options
) -> None:
    """Forward, backward and running statistics of two steps."""
    generator = torch.Generator().manual_seed(sum(held))
    norm = kind(3, **options).to(dtype)
    alone = PLAIN[2 + len(tail)](3, **options).to(dtype)
    for layer in (norm, alone):
        if layer.affine:
            with torch.no_grad():
                layer.weight.copy_(torch.tensor([1.0, 2.0, -0.5]))
                layer.bias.copy_(torch.tensor([0.0, 1.0, 3.0]))
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-6 + shift / 1e5, "atol": 2e-6}
    for _ in range(2):
        shape = (sum(held), 3, *tail)
        values, pull = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
        values = values * 2 + shift
        begin = sum(held[:rank])
        mine = slice(begin, begin + held[rank])
        part, whole = values[mine].clone().requires_grad_(), values.clone().requires_grad_()
        out, wanted = norm(part), alone(whole)
        (out * pull[mine]).sum().backward()
        (wanted * pull).sum().backward()
        torch.testing.assert_close(out, wanted[mine], **tolerance)
        torch.testing.assert_close(part.grad, whole.grad[mine], **tolerance)
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(norm.get_buffer(name), buffer, **tolerance)
    for name, weight in alone.named_parameters():
        total = norm.get_parameter(name).grad.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total, weight.grad, rtol=1e-5, atol=1e-5)


def on_ranks_values(rank: int, world_size: int) -> None:
    float32, float64 = torch.float32, torch.float64
    _case(rank, [1, 3, 0], [], float32, 1.0)
    _case(rank, [1, 3, 2], [], float64, 1000.0)
    _case(rank, [2, 2, 2], [4], float32, 0.0, momentum=None)
    _case(rank, [0, 0, 1], [2, 3], float64, 1.0, affine=False)
    _case(rank, [4, 1, 1], [2, 1, 2], float32, 1.0, track_running_stats=False)

    @settings(max_examples=12, derandomize=True, deadline=None, database=None)
    @given(
        st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(lambda held: sum(held) > 1),
        st.lists(st.integers(1, 3), max_size=3),
    )
    def any_rows(held: list[int], tail: list[int]) -> None:
        _case(rank, held, tail, float64, -2.0)

    any_rows()
    _low_precision(rank)
    _evaluation(rank)
    _errors(rank)
    (slope,) = torch.autograd.grad(
        SyncBatchNorm(3)(x := torch.rand(4, 3, requires_grad=True)).pow(3).sum(), x, None, True, True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def _low_precision(rank: int) -> None:
    norm, alone = SyncBatchNorm(3), nn.BatchNorm1d(3)
    values = (torch.randn(6, 3, generator=torch.Generator().manual_seed(0)) * 3 + 5).bfloat16()
    out = norm(values[2 * rank : 2 * rank + 2])
    assert out.dtype == torch.bfloat16
    wanted = alone(values.float())[2 * rank : 2 * rank + 2]
    torch.testing.assert_close(out.float(), wanted, rtol=0.01, atol=0.01)
    torch.testing.assert_close(norm.running_mean, alone.running_mean)


def _evaluation(rank: int) -> None:
    norm = SyncBatchNorm(3).eval()
    if rank == 0:  # nothing travels
        torch.testing.assert_close(norm(torch.ones(1, 3)), torch.ones(1, 3), rtol=1e-4, atol=0)
    norm.train()


def _errors(rank: int) -> None:
    norm = SyncBatchNorm(3)
    for held in (0, 1):
        with pytest.raises(UsageError, match=f"together have {held} values per channel"):
            norm(torch.ones(held if rank == 2 else 0, 3))
    for shape in ((3,), (2, 4)):
        with pytest.raises(UsageError, match=r"of 3 channels got .*expected \[rows, 3, ...\]"):
            norm(torch.ones(shape))
    assert norm.num_batches_tracked == 0


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_values_are_those_of_one_process(backend: str) -> None:
    ranks(3, backend=backend).run(on_ranks_values)


def test_a_model_is_converted_with_its_weights() -> None:
    inner = nn.Sequential(nn.BatchNorm2d(4, eps=0.1, momentum=0.3), nn.ReLU())
    net = nn.Sequential(nn.Conv2d(3, 4, 1), inner, nn.BatchNorm1d(2, affine=False).eval())
    names = [(name, id(tensor)) for name, tensor in [*net.named_parameters(), *net.named_buffers()]]
    assert SyncBatchNorm.convert(net) is net
    assert [(name, id(tensor)) for name, tensor in [*net.named_parameters(), *net.named_buffers()]] == names
    first, last = net[1][0], net[2]
    assert isinstance(first, SyncBatchNorm)
    assert isinstance(last, SyncBatchNorm)
    assert (first.eps, first.momentum, first.affine, first.training) == (0.1, 0.3, True, True)
    assert (last.affine, last.training, last.track_running_stats) == (False, False, True)
    assert SyncBatchNorm.convert(first) is first
    assert isinstance(SyncBatchNorm.convert(nn.BatchNorm3d(2)), SyncBatchNorm)
    torchs = nn.SyncBatchNorm(2, process_group="some ranks")
    assert SyncBatchNorm.convert(torchs).group == "some ranks"
    assert SyncBatchNorm.convert(torchs, "others").group == "others"  # type: ignore[arg-type]


def on_ranks_torchs_own(rank: int, world_size: int) -> None:
    for held, tail, dtype in (([1, 3, 0], [], torch.float32), ([2, 1, 2], [3, 2], torch.float64)):
        _case(rank, held, tail, dtype, 1.0, nn.SyncBatchNorm)
        _case(rank, held, tail, dtype, 1.0, nn.SyncBatchNorm, momentum=None, affine=False)
        _case(rank, held, tail, dtype, 1.0, nn.SyncBatchNorm, track_running_stats=False)
    norm = nn.SyncBatchNorm(3)
    norm.eval()
    torch.testing.assert_close(norm(torch.ones(rank + 1, 3)), torch.ones(rank + 1, 3))


def on_ranks_ddp(rank: int, world_size: int) -> None:
    """One step of a net with batch normalisation under DDP against one process on all rows."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    net = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    assert isinstance(net[1], nn.SyncBatchNorm)
    ddp = nn.parallel.DistributedDataParallel(net)
    rows = torch.randn(2 * world_size, 4, dtype=torch.float64)
    ddp(rows[2 * rank : 2 * rank + 2]).square().mean().backward()
    alone(rows).square().mean().backward()
    for (name, mine), wanted in zip(net.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad, msg=name)


def on_ranks_refused(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError, match="on GPU") as caught:
        nn.SyncBatchNorm(3)(torch.ones(2, 3))
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        nn.parallel.DistributedDataParallel(nn.SyncBatchNorm(3))
    return str(caught.value)


def test_torchs_own_takes_cpu_tensors_in_our_groups_alone() -> None:
    ranks(3).run(on_ranks_torchs_own)
    ranks(3).run(on_ranks_ddp)
    ranks(3, backend="gloo").run(on_ranks_refused)

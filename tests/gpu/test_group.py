"""The group class with CUDA tensors, on one GPU: one rank, its kernels and its NCCL; two ranks that share the GPU."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpu.world import NEEDS_GPU
from ranks import ranks
from unisono import algorithm
from unisono.errors import UsageError

pytestmark = [NEEDS_GPU, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Any]:
    backend = getattr(request, "param", "unisono")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def calls(group: Any) -> Any:
    return group._cuda


def gpu(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


def test_every_collective(group: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = (gpu(100) * 9).to(dtype)
        y = x.clone()
        dist.all_reduce(y)
        dist.broadcast(y, 0)
        out, into = torch.empty_like(x), [torch.empty_like(x)]
        dist.all_gather_into_tensor(out, x)
        dist.all_gather(into, x)
        assert torch.equal(out, x)
        assert torch.equal(into[0], x)
        assert torch.equal(y, x)
        for call in (
            lambda: dist.reduce_scatter_tensor(out, x),  # noqa: B023
            lambda: dist.all_to_all_single(out, x),  # noqa: B023
            lambda: dist.reduce_scatter(out, [x]),  # noqa: B023
            lambda: dist.scatter(out, [x], 0),  # noqa: B023
            lambda: dist.all_to_all([out], [x]),  # noqa: B023
        ):
            out.zero_()
            call()
            assert torch.equal(out, x)
        dist.reduce(y, 0)
        dist.gather(x, into, 0)
    assert calls(group).kernels is not None
    assert len(calls(group)._launches) >= 15


def test_cpu_tensors_as_before(group: Any) -> None:
    x = torch.arange(5.0)
    dist.all_reduce(x)
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert calls(group).inner is None
    found: list[Any] = [None]
    dist.all_gather_object(found, {"a": 1})
    dist.barrier()
    assert found == [{"a": 1}]


def test_async_calls_and_streams(group: Any) -> None:
    x = gpu(1 << 20)
    want = x.clone()
    side = torch.cuda.Stream()
    for _ in range(20):
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            dist.all_reduce(x)
        torch.cuda.default_stream().wait_stream(side)
    future = dist.all_reduce(x, async_op=True).get_future()
    assert torch.equal(future.wait()[0], want)
    big = gpu(8 << 20)  # 32 MiB: NCCL's
    dist.all_reduce(big, async_op=True).wait()
    torch.cuda.synchronize()
    assert torch.equal(x, want)


def test_what_no_kernel_has_goes_to_nccl(group: Any) -> None:
    for dtype, op in (
        (torch.uint8, dist.ReduceOp.SUM),
        (torch.float64, dist.ReduceOp.AVG),
        (torch.int32, dist.ReduceOp.SUM),
    ):
        x = torch.ones(64, dtype=dtype, device="cuda")
        dist.all_reduce(x, op)
        assert x.sum().item() == 64
    strided = gpu(8, 8).t()
    want = strided.clone()
    dist.all_reduce(strided)
    dist.all_reduce(strided, async_op=True).wait()
    dist.all_gather_into_tensor(strided, want)
    assert torch.equal(strided, want)
    empty = gpu(0)
    dist.all_reduce(empty)
    dist.all_gather_into_tensor(empty, gpu(0))


def test_algorithms_by_name(group: Any) -> None:
    x = gpu(1000)
    want = x.clone()
    with algorithm("ring"):
        dist.all_reduce(x)
    assert torch.equal(x, want)
    with algorithm("ring"), pytest.raises(UsageError, match="NCCL carries it, which takes no algorithm by name"):
        dist.all_reduce(torch.ones(4, dtype=torch.uint8, device="cuda"))


def test_graphs(group: Any) -> None:
    x, side = gpu(4096), torch.cuda.Stream()
    want = x.clone()
    dist.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
    for _ in range(3):
        graph.replay()
    dist.all_reduce(x)
    torch.cuda.synchronize()
    assert torch.equal(x, want)


@pytest.mark.parametrize("group", ["cpu:unisono,cuda:nccl", "cuda:nccl,cpu:unisono"], indirect=True)
def test_nccl_for_cuda_as_asked(group: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "unisono"):
        x, y = gpu(10), torch.ones(3)
        want = x.clone()
        dist.all_reduce(x)
        dist.all_reduce(y)
    assert torch.equal(x, want)
    assert y.tolist() == [1, 1, 1]
    assert calls(group).kernels is None
    assert "NCCL alone: they are switched off" in caplog.text


@pytest.mark.parametrize("group", ["cpu:gloo,cuda:unisono", "cuda:unisono,cpu:gloo"], indirect=True)
def test_gloo_for_cpu_as_asked(group: Any) -> None:
    x, y = gpu(10), torch.ones(3)
    dist.all_reduce(x)
    dist.all_reduce(y)
    assert y.tolist() == [1, 1, 1]


def test_backends_that_can_not_stand_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="cuda:gloo can not stand beside unisono"):
        dist.init_process_group("cpu:unisono,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_mistakes_are_one_line(group: Any) -> None:
    dist.all_reduce(gpu(4))
    with pytest.raises(
        UsageError, match=r"argument 1 is on cpu, but the calls of the default group are on cuda:0 here"
    ):
        dist.all_gather_into_tensor(gpu(4), torch.ones(4))
    with pytest.raises(UsageError, match="this group has failed before"):
        dist.all_reduce(gpu(4))


def test_overloads_of_methods(group: Any) -> None:
    x = gpu(6)
    want, into = x.clone(), torch.empty_like(x)
    for work in (
        group.allreduce([x]),
        group.allreduce(x, dist.ReduceOp.SUM),
        group.allreduce([x], op=dist.ReduceOp.MAX),
        group.broadcast(x, 0),
        group.broadcast(x, root=0),
        group.reduce(x, 0, dist.ReduceOp.SUM),
        group.allgather([[into]], [x]),
        group.reduce_scatter(into, [into]),
        group._allgather_base(into, x),
        group.alltoall_base(into, x, [], []),
    ):
        assert work.wait()
    assert torch.equal(x, want)
    assert torch.equal(into, want)
    with pytest.raises(UsageError, match="2 tensors where a rank has one"):
        group.allreduce([x, x])


def test_freed_memory_is_refused(group: Any) -> None:
    x = gpu(100)
    dist.all_reduce(x)
    x.untyped_storage().resize_(0)
    with pytest.raises(UsageError, match="needs 400 bytes of its storage, which has been resized to 0"):
        dist.all_reduce(x)


def test_sizes_that_do_not_fit_are_refused(group: Any) -> None:
    with pytest.raises(UsageError, match="all_gather_single of 4 elements of float32 over 1 ranks into 5 of float32"):
        dist.all_gather_into_tensor(gpu(5), gpu(4))


def test_device_id_and_a_second_group() -> None:
    for _ in range(2):
        dist.init_process_group(
            "unisono", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0)
        )
        x = gpu(7)
        dist.all_reduce(x)
        inner = dist.new_group([0])
        dist.all_reduce(x, group=inner)
        dist.destroy_process_group()


def test_ddp_and_fsdp(group: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 64).cuda()
    wrapped = DistributedDataParallel(torch.nn.Linear(64, 64).cuda())
    wrapped.module.load_state_dict(plain.state_dict())
    sharded = torch.nn.Linear(64, 64).cuda()
    sharded.load_state_dict(plain.state_dict())
    fully_shard(sharded, mesh=init_device_mesh("cuda", (1,)))
    x = gpu(8, 64)
    losses = []
    for model in (plain, wrapped, sharded):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1]) == pytest.approx(losses[2])


def nothing(rank: int, world_size: int) -> None:
    pass


def shares_a_gpu(rank: int, world_size: int) -> str:
    torch.cuda.set_device(0)
    try:
        dist.all_reduce(torch.ones(4, device="cuda"))
    except UsageError as error:
        return str(error)
    return "nothing"


def test_two_ranks_on_one_gpu_are_told() -> None:
    ranks(2, group=False).run(nothing)  # so that the group is a fresh one
    found = ranks(2).run(shares_a_gpu)
    ranks(2, group=False).run(nothing)  # nor is this one, which has failed, for others
    for words in found:
        assert "ranks 0 and 1 of the default group use one GPU" in words
        assert "torch.cuda.set_device(LOCAL_RANK)" in words

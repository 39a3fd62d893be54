"""The group class on two GPUs, a process for each: kernels over mapped memory, NCCL, the guard, ranks that are lost."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpu.world import NEEDS_GPU
from ranks import FORKS, ranks
from unisono import algorithm
from unisono.errors import MismatchError, UnisonoError, UsageError

pytestmark = [
    NEEDS_GPU,
    pytest.mark.timeout(300),  # the first processes import torch for long
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs"),
]


def rank_order(x: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """The bits of a CPU group for the same call."""
    found = x.cpu()
    dist.all_reduce(found, op)
    return found.cuda()


def values(rank: int, world_size: int) -> list[str]:
    torch.cuda.set_device(rank)
    wrong = []

    def check(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        if not torch.equal(found, wanted):
            wrong.append(what)

    chance = torch.Generator(device="cuda").manual_seed(rank)
    for dtype in (torch.bfloat16, torch.float32):
        for count in (1, 1000, 33_334, 1 << 18, 3 << 20):
            x = torch.randn(count, generator=chance, device="cuda").to(dtype)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX) if count < 40_000 else (dist.ReduceOp.SUM,):
                y, want = x.clone(), rank_order(x, op)
                dist.all_reduce(y, op)
                check(f"all_reduce {dtype} {count} {op}", y, want)
            whole, on_cpu = torch.empty(2 * count, dtype=dtype, device="cuda"), torch.empty(2 * count, dtype=dtype)
            dist.all_gather_into_tensor(whole, x)
            dist.all_gather_into_tensor(on_cpu, x.cpu())
            check(f"all_gather {dtype} {count}", whole, on_cpu.cuda())
            part, cpu_part = torch.empty_like(x), torch.empty(count, dtype=dtype)
            dist.reduce_scatter_tensor(part, whole)
            dist.reduce_scatter_tensor(cpu_part, whole.cpu())
            check(f"reduce_scatter {dtype} {count}", part, cpu_part.cuda())
            swapped, cpu_swapped = torch.empty_like(whole), torch.empty_like(on_cpu)
            whole += rank
            dist.all_to_all_single(swapped, whole)
            dist.all_to_all_single(cpu_swapped, whole.cpu())
            check(f"all_to_all {dtype} {count}", swapped, cpu_swapped.cuda())
            y, z = x.clone(), x.cpu()
            dist.broadcast(y, 1)
            dist.broadcast(z, 1)
            check(f"broadcast {dtype} {count}", y, z.cuda())
    with algorithm("ring"):
        y, want = x.clone(), rank_order(x)
        dist.all_reduce(y)
        check("ring", y, want)
    if dist.group.WORLD._cuda.kernels is None:  # type: ignore[union-attr]
        wrong.append("no kernels")
    return wrong


def messages_and_lists(rank: int, world_size: int) -> list[Any]:
    torch.cuda.set_device(rank)
    mine, theirs = torch.full((4 << 20,), float(rank), device="cuda"), torch.empty(4 << 20, device="cuda")
    (dist.send if rank == 0 else dist.recv)(mine if rank == 0 else theirs, 1 - rank)
    listed = [torch.empty(4 << 20, device="cuda") for _ in range(2)]
    dist.all_gather(listed, torch.full((4 << 20,), float(rank), device="cuda"))
    x = torch.full((4,), 1.0, device="cuda", dtype=torch.float64)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    torch.cuda.synchronize()
    return [theirs[0].item() if rank == 1 else None, [t[0].item() for t in listed], x[0].item()]


def test_values() -> None:
    assert ranks(2).run(values, timeout=250) == [[], []]


def test_messages_and_lists_by_nccl() -> None:
    found = ranks(2).run(messages_and_lists, timeout=200)
    assert found[1][0] == 0.0
    assert [row[1:] for row in found] == [[[0.0, 1.0], 1.0]] * 2


def alternating_streams(rank: int, world_size: int) -> int:
    """Calls on two streams, which nothing orders but the group; the number of wrong results."""
    torch.cuda.set_device(rank)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    xs = [torch.full((20_000,), float(k + rank), device="cuda") for k in range(200)]
    torch.cuda.synchronize()
    for k, x in enumerate(xs):
        with torch.cuda.stream(streams[k % 2]):
            if k % 7 == rank:
                torch.cuda._sleep(100_000)  # type: ignore[no-untyped-call]
            dist.all_reduce(x)
    torch.cuda.synchronize()
    return sum(not bool((x == 2 * k + 1).all()) for k, x in enumerate(xs))


def graph(rank: int, world_size: int) -> list[float]:
    torch.cuda.set_device(rank)
    x, y = torch.ones(5000, device="cuda"), torch.empty(10_000, device="cuda")
    dist.all_reduce(x)
    dist.all_gather_into_tensor(y, x)
    x.fill_(1.0)
    torch.cuda.synchronize()
    captured, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(captured, stream=side):
        dist.all_reduce(x)
        dist.all_gather_into_tensor(y, x, async_op=True).wait()
    for _ in range(5):
        captured.replay()
    dist.all_reduce(x)
    torch.cuda.synchronize()
    return [x[0].item(), y.sum().item()]


def test_two_streams_never_race() -> None:
    assert ranks(2).run(alternating_streams, timeout=100) == [0, 0]


def test_graphs() -> None:
    assert ranks(2).run(graph, timeout=100) == [[64.0, 320_000.0]] * 2


def losses(rank: int) -> dict[str, list[float]]:
    """Of 20 steps by DDP, FSDP2 and tensor parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, found = init_device_mesh("cuda", (2,)), {}
    for name in ("ddp", "fsdp", "tp"):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)).cuda()
        if name == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        elif name == "fsdp":
            fully_shard(model, mesh=mesh)
        else:
            model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        torch.manual_seed(5 if name == "tp" else rank)
        rows = []
        for _ in range(20):
            x = torch.randn(32, 256, device="cuda")
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows.append(loss.item())
        found[name] = rows
    return found


def trained(rank: int, path: str, result: Any) -> None:
    torch.cuda.set_device(rank)
    found = []
    for backend in ("unisono", "nccl"):
        dist.init_process_group(backend, init_method=f"file://{path}-{backend}", rank=rank, world_size=2)
        found.append(losses(rank))
        dist.destroy_process_group()
    result.put(found)


def test_training_gives_the_losses_of_nccl(tmp_path: Any) -> None:
    result = FORKS.Queue()
    processes = [FORKS.Process(target=trained, args=(rank, str(tmp_path / "meeting"), result)) for rank in range(2)]
    for process in processes:
        process.start()
    found = [result.get(timeout=120) for _ in processes]
    for process in processes:
        process.join(30)
    for ours, theirs in found:
        for name in ("ddp", "fsdp", "tp"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5)
            assert ours[name][-1] < ours[name][0]


def alone(rank: int, path: str, result: Any, fn: Callable[[int], str], timeout: float) -> None:
    import datetime

    torch.cuda.set_device(rank)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("unisono", init_method=f"file://{path}", rank=rank, world_size=2, timeout=limit)
    x = torch.ones(1000, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.monotonic()
    try:
        words = fn(rank)
    except UnisonoError as error:
        words = f"{type(error).__name__}: {error}"
    y = torch.ones(3, device="cuda") * 2  # the process and its GPU live on
    result.put((rank, words, time.monotonic() - begin, y.sum().item()))
    dist.destroy_process_group()


def both(tmp_path: Any, fn: Callable[[int], str], timeout: float = 20.0) -> dict[int, tuple[str, float, float]]:
    """What `fn` gives or raises on each of two fresh processes, how long it took, and what the GPU computes after."""
    result = FORKS.Queue()
    path = str(tmp_path / "meeting")
    processes = [FORKS.Process(target=alone, args=(rank, path, result, fn, timeout)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        if process.is_alive():
            process.kill()
    found = {}
    while not result.empty():
        rank, *rest = result.get()
        found[rank] = tuple(rest)
    return found


def until_raised(seconds: float = 15.0, groups: Sequence[Any] = ()) -> str:
    """Calls until the failure of a group, the default one if none are given, is raised here."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.1)
        for group in groups or [dist.group.WORLD]:
            group._cuda.raise_failure()
    return "nothing"


def other_sizes(rank: int) -> str:
    dist.all_reduce(torch.ones(1000 + rank, device="cuda"))
    torch.cuda.synchronize()
    return until_raised()


def other_sizes_by_nccl(rank: int) -> str:
    dist.all_reduce(torch.ones((32 << 20) + rank, device="cuda"))
    torch.cuda.synchronize()
    return until_raised()


def kernel_against_nccl(rank: int) -> str:
    if rank:
        dist.all_reduce(torch.ones(32 << 20, device="cuda"))
    else:
        dist.all_reduce(torch.ones(1000, device="cuda"))
    torch.cuda.synchronize()
    return until_raised()


def wrong_device(rank: int) -> str:
    if rank:
        dist.all_gather_into_tensor(torch.ones(4, device="cuda"), torch.ones(2))
    dist.all_gather_into_tensor(torch.ones(4, device="cuda"), torch.ones(2, device="cuda"))
    torch.cuda.synchronize()
    return until_raised()


def absent(rank: int) -> str:
    if rank:
        time.sleep(6)
        return "absent"
    dist.all_reduce(torch.ones(1000, device="cuda"))
    torch.cuda.synchronize()
    return until_raised()


def killed(rank: int) -> str:
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(32 << 20, device="cuda"))
    torch.cuda.synchronize()
    return until_raised()


@pytest.mark.parametrize("fn", [other_sizes, other_sizes_by_nccl, kernel_against_nccl])
def test_calls_that_differ_raise_on_both(tmp_path: Any, fn: Any) -> None:
    found = both(tmp_path, fn)
    assert set(found) == {0, 1}
    for words, seconds, after in found.values():
        assert MismatchError.__name__ in words
        assert "the ranks of the default group disagree about call no. 2 on GPUs" in words
        assert seconds < 10
        assert after == 6


def test_a_mistake_on_one_rank_ends_both(tmp_path: Any) -> None:
    found = both(tmp_path, wrong_device)
    assert UsageError.__name__ in found[1][0]
    assert "argument 1 is on cpu" in found[1][0]
    assert "-> rank 1: all_gather() refused its arguments" in found[0][0]


def test_an_absent_rank_is_named(tmp_path: Any) -> None:
    words, seconds, after = both(tmp_path, absent, timeout=2.0)[0]
    assert "CollectiveTimeout" in words
    assert "rank 1 missing" in words
    assert 1.5 < seconds < 6
    assert after == 6


def test_a_killed_rank_is_named(tmp_path: Any) -> None:
    words, seconds, after = both(tmp_path, killed)[0]
    assert "PeerLostError" in words
    assert "rank 1" in words
    assert seconds < 10
    assert after == 6

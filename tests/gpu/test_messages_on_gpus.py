"""Messages by kernels: N ranks on one GPU; a group of one rank; two GPUs, a process for each."""

import os
import random
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpu.test_two_gpus import both, until_raised
from gpu.world import NEEDS_GPU, World
from ranks import ranks
from unisono.errors import CollectiveTimeout, MismatchError, PeerLostError
from unisono.gpu.defaults import MESSAGE_NBYTES

pytestmark = [NEEDS_GPU, pytest.mark.timeout(300)]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")
SIZES = (1, 15, 16, 17, 4096, 32_768, 32_769, 100_001, 1 << 20, (4 << 20) + 40, MESSAGE_NBYTES)


def data(nbytes: int, seed: int) -> torch.Tensor:
    chance = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda", generator=chance)


# N ranks on one GPU.


@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_size_between_all_pairs(n: int) -> None:
    here, moved = World(n), []
    torch.cuda.synchronize()
    for k, nbytes in enumerate(SIZES):
        for source in range(n):
            for target in range(n):
                x, out = data(nbytes, k), torch.full((nbytes,), 7, dtype=torch.uint8, device="cuda")
                moved.append((x, out))
                torch.cuda.synchronize()
                here.receive(target, source, out) if k % 2 else here.send(source, target, x)
                here.send(source, target, x) if k % 2 else here.receive(target, source, out)
    torch.cuda.synchronize()
    assert here.failures() == [""] * n
    assert [x.numel() for x, out in moved if not torch.equal(x, out)] == []


def test_random_messages_with_random_delays() -> None:
    n, here, chance, moved = 3, World(3), random.Random(1), []
    torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
    for k in range(300):
        source, target = chance.randrange(n), chance.randrange(n)
        x, out = data(chance.choice((8, 1000, 40_000, 300_000)), k), None
        out = torch.zeros_like(x)
        moved.append((x, out))
        torch.cuda.synchronize() if k % 10 == 0 else None
        for op, rank, peer in (("send", source, target), ("recv", target, source)):
            here.side(op, rank, peer)
            with torch.cuda.stream(here.sides[op, rank, peer]):
                here.sides[op, rank, peer].wait_stream(torch.cuda.default_stream())
                torch.cuda._sleep(chance.choice((0, 0, 100_000)))  # type: ignore[no-untyped-call]
        here.send(source, target, x)
        here.receive(target, source, out)
    torch.cuda.synchronize()
    assert here.failures() == [""] * n
    assert sum(not torch.equal(x, out) for x, out in moved) == 0


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("each", [1, 2])
def test_rings_in_one_launch_and_in_graphs(each: int, n: int) -> None:
    here, sizes = World(n), (1 << 20, 300_000)[:each]
    xs = [[data(nbytes, 10 * k + rank) for k, nbytes in enumerate(sizes)] for rank in range(n)]
    outs = [[data(nbytes, 99) for nbytes in sizes] for _ in range(n)]

    def ring() -> None:
        for rank in range(n):
            here.exchange(rank, (rank + 1) % n, xs[rank], (rank - 1) % n, outs[rank])

    torch.cuda.synchronize()
    ring()
    torch.cuda.synchronize()
    graph, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=main):
        for rank in range(n):
            here.sides["both", rank, 0].wait_stream(main)
        for _ in range(5):
            ring()
        for rank in range(n):
            main.wait_stream(here.sides["both", rank, 0])
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert here.failures() == [""] * n
    assert all(torch.equal(out, x) for rank in range(n) for out, x in zip(outs[rank], xs[rank - 1], strict=True))


def test_a_send_ends_before_its_receive_is_there() -> None:
    here = World(2, limit=1.0)
    x, outs = data(4096, 1), [torch.zeros(4096, dtype=torch.uint8, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(4):
        here.send(0, 1, x)
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 0.5
    for out in outs:
        here.receive(1, 0, out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, x) for out in outs)
    assert here.failures() == ["", ""]


def test_another_header_ends_the_kernels() -> None:
    here = World(2, limit=20.0)
    x, out = data(4096, 1), data(4096, 2)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    here.send(0, 1, x, 7)
    here.receive(1, 0, out, 8)
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 2
    found = here.spaces[1].failure()
    assert found is not None
    assert (found.kind, found.peer, found.came & 0xFFFFFFFF, found.expected & 0xFFFFFFFF) == ("mismatch", 0, 7, 8)


def test_a_message_that_does_not_come_ends_at_the_limit() -> None:
    here = World(2, limit=0.1)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    here.receive(0, 1, data(4096, 1))
    torch.cuda.synchronize()
    assert 0.09 < time.perf_counter() - begin < 0.5
    found = here.spaces[0].failure()
    assert found is not None
    assert (found.kind, found.peer) == ("limit", 1)


# A group of one rank.


def test_messages_to_itself() -> None:
    dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for x in (
            torch.randn(1000, device="cuda"), torch.randn(30, 30, device="cuda").t(), torch.randn(9, device="cuda")[1:],
            torch.ones(0, device="cuda"), torch.ones(5, device="cuda", dtype=torch.bool),
            torch.randn(7, device="cuda", dtype=torch.complex64),
        ):  # fmt: skip
            out = torch.empty_like(x)
            works = [dist.isend(x, 0), dist.irecv(out, 0)]
            for work in works:
                work.wait()
            assert torch.equal(out, x)
            gaps = torch.zeros(*x.shape, 2, device="cuda", dtype=x.dtype)[..., 0]
            for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, gaps, 0), dist.P2POp(dist.isend, x, 0)]):
                work.wait()
            assert torch.equal(gaps, x)
    finally:
        dist.destroy_process_group()


# Two GPUs.


def exchanges(rank: int, world_size: int) -> list[str]:
    """Both ways at once, without a batch and with one, of every size; the sizes that came wrong."""
    torch.cuda.set_device(rank)
    wrong, peer = [], 1 - rank
    for k, nbytes in enumerate((*SIZES, 32 << 20)):
        x, want = data(nbytes, 2 * k + rank), data(nbytes, 2 * k + peer)
        for batch in (False, True):
            out = torch.zeros_like(x)
            ops = [(dist.isend, x), (dist.irecv, out)] if (k + rank) % 2 else [(dist.irecv, out), (dist.isend, x)]
            if batch:
                works = dist.batch_isend_irecv([dist.P2POp(op, tensor, peer) for op, tensor in ops])
            elif nbytes <= MESSAGE_NBYTES:
                works = [op(tensor, peer) for op, tensor in ops]
            else:
                works = [(dist.isend if rank else dist.irecv)(x if rank else out, peer)]
                works.append((dist.irecv if rank else dist.isend)(out if rank else x, peer))
            for work in works:
                work.wait()
            if not torch.equal(out, want):
                wrong.append(f"{nbytes} batch {batch}")
    return wrong


def pipelined(rank: int, world_size: int) -> list[float]:
    """Messages of changing dtypes and shapes, computation and collectives between them, as a pipeline has them."""
    torch.cuda.set_device(rank)
    total, x = [], torch.ones(200, 300, device="cuda") * (rank + 1)
    for step in range(30):
        dtype = (torch.float32, torch.bfloat16, torch.int32)[step % 3]
        mine, theirs = (x * step).to(dtype), torch.empty(200, 300, device="cuda", dtype=dtype)
        if rank == 0:
            dist.send(mine, 1, tag=step)
            dist.recv(theirs, 1, tag=step)
        else:
            dist.recv(theirs, 0, tag=step)
            dist.send(mine, 0, tag=step)
        theirs = theirs.float() * 2
        dist.all_reduce(theirs)
        total.append(theirs.mean().item())
    return total


def many_ahead(rank: int, world_size: int) -> int:
    """More sends than slots before the first receive; the number of wrong ones."""
    torch.cuda.set_device(rank)
    xs = [torch.full((3000,), float(k), device="cuda") for k in range(40)]
    outs = [torch.zeros(3000, device="cuda") for _ in xs]
    works = [dist.isend(x, 1) for x in xs] if rank == 0 else []
    if rank:
        time.sleep(0.5)
        works = [dist.irecv(out, 0) for out in outs]
    for work in works:
        work.wait()
    torch.cuda.synchronize()
    return sum(not torch.equal(x, out) for x, out in zip(xs, outs, strict=True)) if rank else 0


def keys_and_values(rank: int, world_size: int) -> list[int]:
    """Two messages each way in a batch, as rings of attention have them; three, which are a launch each."""
    torch.cuda.set_device(rank)
    wrong, peer = [], 1 - rank
    for k in range(12):
        sizes = (4096, 20_000, 64)[: 2 + k % 2]
        xs = [data(nbytes, 100 * k + 10 * number + rank) for number, nbytes in enumerate(sizes)]
        wanted = [data(nbytes, 100 * k + 10 * number + peer) for number, nbytes in enumerate(sizes)]
        outs = [torch.zeros_like(x) for x in xs]
        ops = [dist.P2POp(dist.isend, x, peer) for x in xs] + [dist.P2POp(dist.irecv, out, peer) for out in outs]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        if not all(torch.equal(out, want) for out, want in zip(outs, wanted, strict=True)):
            wrong.append(k)
    return wrong


def captured(rank: int, world_size: int) -> float:
    torch.cuda.set_device(rank)
    x, out = torch.full((5000,), float(rank), device="cuda"), torch.zeros(5000, device="cuda")
    side = torch.cuda.Stream()

    def swap() -> None:
        ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, out, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        x.copy_(out + 1)

    swap()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        swap()
        swap()
    for _ in range(4):
        graph.replay()
    torch.cuda.synchronize()
    swap()
    return x[17].item()


@two_gpus
def test_exchanges_both_ways_never_block() -> None:
    assert ranks(2).run(exchanges, timeout=200) == [[], []]


@two_gpus
def test_a_pipeline_of_messages_and_collectives() -> None:
    for found in ranks(2).run(pipelined, timeout=100):
        assert found == pytest.approx([6.0 * step for step in range(30)])


@two_gpus
def test_more_sends_than_slots_wait_for_their_receives() -> None:
    assert ranks(2).run(many_ahead, timeout=100) == [0, 0]


@two_gpus
def test_batches_of_several_messages() -> None:
    assert ranks(2).run(keys_and_values, timeout=100) == [[], []]


@two_gpus
def test_messages_in_graphs() -> None:
    """Ten swaps, one before and one after the graph: each adds one to what the other had."""
    assert sorted(ranks(2).run(captured, timeout=100)) == [10.0, 11.0]


def other_size(rank: int) -> str:
    x = torch.ones(1000 + rank, device="cuda")
    work = dist.irecv(x, 0) if rank else dist.isend(x, 1)
    work.wait()
    torch.cuda.synchronize()
    return until_raised()


def kernel_against_nccl(rank: int) -> str:
    x = torch.ones((MESSAGE_NBYTES // 4) + 4 * rank, device="cuda")
    work = dist.irecv(x, 0) if rank else dist.isend(x, 1)
    work.wait()
    torch.cuda.synchronize()
    return until_raised()


def no_sender(rank: int) -> str:
    if rank:
        time.sleep(6)
        return "absent"
    dist.recv(torch.ones(1000, device="cuda"), 1)
    torch.cuda.synchronize()
    return until_raised()


def killed_sender(rank: int) -> str:
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.ones(1000, device="cuda"), 1)
    torch.cuda.synchronize()
    return until_raised()


@two_gpus
@pytest.mark.parametrize("fn", [other_size, kernel_against_nccl])
def test_messages_that_differ_raise_on_both(tmp_path: Any, fn: Any) -> None:
    found = both(tmp_path, fn, timeout=5.0)
    assert set(found) == {0, 1}
    for words, seconds, after in found.values():
        assert MismatchError.__name__ in words
        assert "message no. 1 from rank 0 to rank 1 of the default group on GPUs: rank 0 sends" in words
        assert seconds < 10
        assert after == 6


@two_gpus
def test_a_message_that_never_comes_is_named(tmp_path: Any) -> None:
    words, seconds, after = both(tmp_path, no_sender, timeout=2.0)[0]
    assert CollectiveTimeout.__name__ in words
    assert "recv no. 1 from rank 1 of the default group on GPUs did not end" in words
    assert 1.5 < seconds < 6
    assert after == 6


@two_gpus
def test_a_killed_sender_is_named(tmp_path: Any) -> None:
    words, seconds, after = both(tmp_path, killed_sender)[0]
    assert PeerLostError.__name__ in words
    assert "rank 1" in words
    assert seconds < 10
    assert after == 6

"""send, recv, isend, irecv, receive from anyone, batches: every dtype, layout, tag; orders that may not deadlock."""

import math
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from contract.layouts import LAYOUTS, lay
from contract.values import DTYPES, data
from ranks import ranks

SHAPES = ((7,), (3, 5), (), (0,), (1000,), (64, 257))
LARGE = 1 << 20  # elements of float32: beyond any buffer, so that a send cannot end before its receive


def ring_of_everything(rank: int, world_size: int) -> list[str]:
    """Pass every dtype, layout and shape once around, receive first on even cases, blocking on every third."""
    warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    problems: list[str] = []
    cases = [(dtype, layout) for dtype in DTYPES for layout in LAYOUTS]
    for seed, (dtype, layout) in enumerate(cases):
        shape = SHAPES[seed % len(SHAPES)]
        values = [data(dtype, math.prod(shape), 100 * seed + r).view(shape) for r in (rank, before)]
        sent, received = lay(layout, shape, dtype, values[0]), lay(layout, shape, dtype)
        if seed % 3 == 2:
            order = (0, 1) if rank == 0 else (1, 0)  # a blocking ring needs one rank that sends first
            for turn in order:
                _ = dist.recv(received.view, before, tag=seed) if turn else dist.send(sent.view, after, tag=seed)
        else:
            works = []
            for receive in (seed % 2 == 0, seed % 2 == 1):
                start, laid, peer = (dist.irecv, received, before) if receive else (dist.isend, sent, after)
                works.append(start(laid.view, peer, tag=seed))
            for work in works:
                work.wait()
                if not work.is_completed():
                    problems.append(f"{dtype} {layout}: not completed after wait")
        problems += [f"{dtype} {layout} {shape}: {x}" for x in (sent.check(None), received.check(values[1])) if x]
    return problems


def tags_out_of_order(rank: int, world_size: int) -> list[list[float]]:
    """Everyone sends tags 1..5 to the next rank, which asks for them backwards; one tag twice keeps its order."""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    tags = [1, 2, 3, 3, 4, 5]
    works = [
        dist.isend(torch.full((8,), float(100 * rank + 10 * tag + index)), after, tag=tag)
        for index, tag in enumerate(tags)
    ]
    got = {}
    for tag in (5, 4, 3, 3, 2, 1):
        x = torch.empty(8)
        dist.recv(x, before, tag=tag)
        got.setdefault(tag, []).append(x[0].item() - 100 * before)
    for work in works:
        work.wait()
    return [got[tag] for tag in (1, 2, 3, 4, 5)]


def receive_from_anyone(rank: int, world_size: int) -> dict[int, list[float]]:
    """Rank 0 takes three messages of everyone without knowing who comes next."""
    if rank:
        for i in range(3):
            dist.send(torch.tensor([float(10 * rank + i)]), 0)
        return {}
    got: dict[int, list[float]] = {}
    for _ in range(3 * (world_size - 1)):
        x = torch.empty(1)
        source = dist.recv(x)
        got.setdefault(source, []).append(x.item())
    return got


def irecv_from_anyone(rank: int, world_size: int) -> list[int]:
    """Both rank 0 and rank 1 wait for whoever comes, in a group that does not begin at rank 0 as well."""
    if rank == 0:
        x = torch.empty(2)
        work = dist.irecv(x)
        work.wait()
        return [work._source_rank(), int(x[0])]
    if rank == world_size - 1:
        dist.send(torch.tensor([5.0, 6.0]), 0)
    return []


def batches(rank: int, world_size: int) -> list[str]:
    """All pairs at once, in every order of sends and receives, small and larger than any buffer."""
    problems = []
    for seed, count in enumerate((1, 1000, LARGE // world_size)):
        peers = [peer for peer in range(world_size) if peer != rank]
        received = {peer: torch.empty(count) for peer in peers}
        operations = []
        for peer in peers:
            send = dist.P2POp(dist.isend, torch.full((count,), float(10 * rank + peer)), peer)
            receive = dist.P2POp(dist.irecv, received[peer], peer)
            operations += [send, receive] if seed % 2 else [receive, send]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        wrong = [peer for peer in peers if not received[peer].eq(10.0 * peer + rank).all()]
        problems += [f"{count} elements from {peer}: {received[peer][:4].tolist()}" for peer in wrong]
    return problems


def large_sends_cross(rank: int, world_size: int) -> bool:
    """Everyone has started sending before anyone receives."""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    sending = dist.isend(torch.full((LARGE,), float(rank)), after)
    x = torch.empty(LARGE)
    dist.recv(x, before)
    sending.wait()
    return bool(x.eq(float(before)).all())


def among_collectives(rank: int, world_size: int) -> tuple[float, float, float]:
    """A message in flight does not disturb collectives, nor they it."""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    first, second = torch.empty(3), torch.empty(3)
    receiving = dist.irecv(first, before, tag=1)
    total = torch.tensor([1.0])
    dist.all_reduce(total)
    sending = [dist.isend(torch.full((3,), float(rank)), after, tag=1)]
    dist.all_reduce(total)
    sending.append(dist.isend(torch.full((3,), rank + 0.5), after))
    dist.barrier()
    receiving.wait()
    dist.recv(second, before)
    for work in sending:
        work.wait()
    return total.item(), first[0].item() - before, second[0].item() - before


def completion_without_wait(rank: int, world_size: int) -> tuple[bool, bool]:
    """An irecv is not completed before the message is there, and is soon after, without wait."""
    if rank == 1:
        dist.barrier()
        dist.send(torch.ones(4), 0)
        return True, True
    x = torch.zeros(4)
    work = dist.irecv(x, 1) if rank == 0 else None
    early = work is not None and work.is_completed()
    dist.barrier()
    deadline = time.monotonic() + 10
    while work is not None and not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    return not early, work is None or (work.is_completed() and bool(x.eq(1).all()))


def within_a_group(rank: int, world_size: int) -> list[float]:
    """In a subgroup peers are named by global rank or by rank of the group."""
    members = list(range(1, world_size))
    group = dist.new_group(members)
    if rank == 0:
        return []
    x, y = torch.empty(1), torch.empty(1)
    me, size = members.index(rank), len(members)
    works = [
        dist.isend(torch.tensor([float(rank)]), members[(me + 1) % size], group=group),
        dist.isend(torch.tensor([float(rank) + 0.5]), group_dst=(me + 1) % size, group=group, tag=3),
    ]
    source = dist.recv(x, members[(me - 1) % size], group=group)
    dist.recv(y, group_src=(me - 1) % size, group=group, tag=3)
    for work in works:
        work.wait()
    dist.destroy_process_group(group)
    return [x.item(), y.item() - 0.5, float(source)]


sizes = pytest.mark.parametrize("world_size", [2, 3, 5, 8], indirect=True)


@sizes
def test_every_dtype_and_layout(world_size: int) -> None:
    assert ranks(world_size).run(ring_of_everything) == [[]] * world_size


@sizes
def test_tags_are_matched_not_positions(world_size: int) -> None:
    assert ranks(world_size).run(tags_out_of_order) == [[[10], [21], [32, 33], [44], [55]]] * world_size


@sizes
def test_receive_from_anyone(world_size: int) -> None:
    got = ranks(world_size).run(receive_from_anyone)[0]
    assert got == {r: [10.0 * r, 10.0 * r + 1, 10.0 * r + 2] for r in range(1, world_size)}


@sizes
def test_irecv_from_anyone_names_its_source(world_size: int) -> None:
    assert ranks(world_size).run(irecv_from_anyone)[0] == [world_size - 1, 5]


@sizes
def test_batches_never_deadlock(world_size: int) -> None:
    assert ranks(world_size).run(batches) == [[]] * world_size


@sizes
def test_large_sends_may_cross(world_size: int) -> None:
    assert ranks(world_size).run(large_sends_cross) == [True] * world_size


@sizes
def test_messages_and_collectives_do_not_mix(world_size: int) -> None:
    total = float(world_size) ** 2
    assert ranks(world_size).run(among_collectives) == [(total, 0.0, 0.5)] * world_size


@sizes
def test_completion_is_seen_without_wait(world_size: int) -> None:
    assert ranks(world_size).run(completion_without_wait) == [(True, True)] * world_size


@pytest.mark.parametrize("world_size", [3, 5, 8], indirect=True)
def test_within_a_group(world_size: int) -> None:
    members = list(range(1, world_size))
    before = [members[i - 1] for i in range(len(members))]
    assert ranks(world_size).run(within_a_group)[1:] == [[b, b, b] for b in before]


def sources_of_collectives(rank: int, world_size: int) -> list[bool]:
    """A call that received no message has no source, whether it is done already or not."""
    refused = []
    for late in (0, 1):
        if rank == late:
            time.sleep(0.05)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        try:
            work._source_rank()
            refused.append(False)
        except RuntimeError:
            refused.append(True)
        work.wait()
    return refused


def test_a_collective_has_no_source() -> None:
    assert ranks(2).run(sources_of_collectives) == [[True, True]] * 2

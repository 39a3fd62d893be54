"""The examples of the field's tutorials give exactly the values they print."""

import math
import time

import pytest
import torch
import torch.distributed as dist

from ranks import ranks


def broadcast_to_four(rank: int, world_size: int) -> list[int]:
    x = torch.tensor([1, 2]) if rank == 0 else torch.zeros(2, dtype=torch.int64)
    dist.broadcast(x, src=0)
    return x.tolist()


def scatter_four_lists(rank: int, world_size: int) -> list[int]:
    x = torch.empty(2, dtype=torch.int64)
    parts = [torch.tensor([10 * r + 1, 10 * r + 2]) for r in range(4)] if rank == 0 else None
    dist.scatter(x, parts, src=0)
    return x.tolist()


def one_to_eight(rank: int) -> torch.Tensor:
    """Return [1, 2], [3, 4], [5, 6], [7, 8] by rank: they add up to [16, 20]."""
    return torch.tensor([2 * rank + 1, 2 * rank + 2])


def gather_on_one(rank: int, world_size: int) -> list[list[int]]:
    parts = [torch.empty(2, dtype=torch.int64) for _ in range(4)] if rank == 0 else None
    dist.gather(one_to_eight(rank), parts, dst=0)
    return [part.tolist() for part in parts or []]


def reduce_to_three(rank: int, world_size: int) -> list[int]:
    x = one_to_eight(rank)
    dist.reduce(x, dst=3)
    return x.tolist()


def all_gather(rank: int, world_size: int) -> list[list[int]]:
    parts = [torch.empty(2, dtype=torch.int64) for _ in range(4)]
    dist.all_gather(parts, one_to_eight(rank))
    return [part.tolist() for part in parts]


def all_reduce(rank: int, world_size: int) -> list[int]:
    x = one_to_eight(rank)
    dist.all_reduce(x)
    return x.tolist()


def reduce_scatter_of_powers(rank: int, world_size: int) -> list[int]:
    """Rank r gives [r+1, 2(r+1)], its squares and its cubes to ranks 0, 1 and 2."""
    base = torch.tensor([rank + 1, 2 * (rank + 1)])
    x = torch.empty(2, dtype=torch.int64)
    dist.reduce_scatter(x, [base**power for power in (1, 2, 3)])
    return x.tolist()


def ramp(rank: int, world_size: int) -> tuple[list[int], list[int], list[int]]:
    """[0, 1, 2, 3] + rank: all_reduce; reduce_scatter; and all_gather of the parts."""
    whole = torch.arange(4) + rank
    dist.all_reduce(whole)
    part = torch.empty(1, dtype=torch.int64)
    dist.reduce_scatter_tensor(part, torch.arange(4) + rank)
    back = torch.empty(4, dtype=torch.int64)
    dist.all_gather_into_tensor(back, part)
    return whole.tolist(), part.tolist(), back.tolist()


def sleepers_meet(rank: int, world_size: int) -> float:
    """Rank r sleeps r seconds before the barrier; return how long after the common start it was let go."""
    dist.barrier()
    start = time.monotonic()
    time.sleep(rank)
    dist.barrier()
    return time.monotonic() - start


def doubling_chain(rank: int, world_size: int) -> list[float]:
    """Rank 0 sends [100, 200], rank 1 doubles it and sends it on to rank 2."""
    x = torch.tensor([100.0, 200.0]) if rank == 0 else torch.zeros(2)
    if rank > 0:
        dist.recv(x, rank - 1)
    if rank == 1:
        x *= 2
    if rank + 1 < world_size:
        dist.send(x, rank + 1)
    return x.tolist()


def ping_pong(rank: int, world_size: int) -> list[float]:
    """A number goes there and back, growing by one on each arrival."""
    x = torch.zeros(1)
    seen = []
    if rank == 0:
        dist.send(x, 1)
    dist.recv(x, 1 - rank)
    x += 1
    seen.append(x.item())
    if rank == 1:
        dist.send(x, 0)
    return seen


def weighted_sum(rank: int, world_size: int) -> float:
    """The mean of all values by weight, from two all_reduces: (1·10 + 2·20 + 3·30 + 4·40) / 10 = 30."""
    weight, value = rank + 1.0, 10.0 * (rank + 1)
    x = torch.tensor([weight * value, weight])
    dist.all_reduce(x)
    return (x[0] / x[1]).item()


def softmax(rank: int, world_size: int) -> list[float]:
    """Softmax of 8 numbers, two on each rank: MAX, then SUM of the exponentials."""
    x = torch.tensor([2.0 * rank, 2.0 * rank + 1], dtype=torch.float64) / 3
    largest = x.max().reshape(1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    exponentials = (x - largest).exp()
    total = exponentials.sum().reshape(1)
    dist.all_reduce(total)
    return (exponentials / total).tolist()


def l2_norm(rank: int, world_size: int) -> tuple[float, float]:
    """The square of the norm of (1, 2, ..., 8), two numbers on each rank: 204; and its root."""
    square = one_to_eight(rank).double().square().sum().reshape(1)
    dist.all_reduce(square)
    return square.item(), square.sqrt().item()


def strings(rank: int, world_size: int) -> list[str]:
    """Strings of different length gathered by all_gather: lengths first, then padded bytes."""
    encoded = torch.tensor(list(("rank " + "I" * (rank + 1)).encode()), dtype=torch.uint8)
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(lengths, torch.tensor([len(encoded)]))
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(encoded)] = encoded
    rows = [torch.empty(longest, dtype=torch.uint8) for _ in range(world_size)]
    dist.all_gather(rows, padded)
    return [bytes(row[: int(length)].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]


def test_broadcast() -> None:
    assert ranks(4).run(broadcast_to_four) == [[1, 2]] * 4


def test_scatter() -> None:
    assert ranks(4).run(scatter_four_lists) == [[1, 2], [11, 12], [21, 22], [31, 32]]


def test_gather() -> None:
    assert ranks(4).run(gather_on_one) == [[[1, 2], [3, 4], [5, 6], [7, 8]], [], [], []]


def test_reduce_leaves_the_senders_alone() -> None:
    assert ranks(4).run(reduce_to_three) == [[1, 2], [3, 4], [5, 6], [16, 20]]


def test_all_gather() -> None:
    assert ranks(4).run(all_gather) == [[[1, 2], [3, 4], [5, 6], [7, 8]]] * 4


def test_all_reduce() -> None:
    assert ranks(4).run(all_reduce) == [[16, 20]] * 4


def test_reduce_scatter_of_powers() -> None:
    assert ranks(3).run(reduce_scatter_of_powers) == [[6, 12], [14, 56], [36, 288]]


def test_ramp() -> None:
    whole = [6, 10, 14, 18]
    assert ranks(4).run(ramp) == [(whole, [whole[r]], whole) for r in range(4)]


def test_barrier_releases_all_with_the_last() -> None:
    times = ranks(3).run(sleepers_meet)
    assert all(1.9 <= t < 2.5 for t in times), times  # the last one may have started a moment before


def test_send_chain() -> None:
    assert ranks(3).run(doubling_chain) == [[100, 200], [200, 400], [200, 400]]


def test_ping_pong() -> None:
    assert ranks(2).run(ping_pong) == [[2.0], [1.0]]


def test_weighted_sum() -> None:
    assert ranks(4).run(weighted_sum) == [30.0] * 4


def test_softmax() -> None:
    expected = torch.softmax(torch.arange(8, dtype=torch.float64) / 3, 0)
    got = torch.tensor(ranks(4).run(softmax), dtype=torch.float64).flatten()
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=0)


def test_l2_norm() -> None:
    root = pytest.approx(math.sqrt(204), rel=2**-52)  # torch's own root is not rounded to the nearest on every CPU
    assert ranks(4).run(l2_norm) == [(204.0, root)] * 4


def test_strings() -> None:
    assert ranks(4).run(strings) == [["rank I", "rank II", "rank III", "rank IIII"]] * 4

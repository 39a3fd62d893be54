"""A tensor above 2 GiB: no count or offset is kept in 31 bits."""

import torch
import torch.distributed as dist

from ranks import ranks

COUNT = (1 << 31) + 4104  # of bytes, and of whole words


def past_two_gib(rank: int, world_size: int) -> list[list[int]]:
    """Broadcast, then reduce by MAX; look at both ends and around 2^31."""
    places = torch.tensor([0, 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, COUNT - 1])
    x = torch.zeros(COUNT, dtype=torch.uint8)
    if rank == 1:
        x[places] = torch.arange(1, 7, dtype=torch.uint8)
    dist.broadcast(x, 1)
    seen = [x[places].tolist()]
    x[places] += rank
    dist.all_reduce(x, dist.ReduceOp.MAX)
    seen.append(x[places].tolist())
    words = x.view(torch.int64)  # which are looked through in a quarter of the time
    touched = words[places // 8].view(torch.uint8).view(-1, 8)[[0, 2, 3, 5]]  # two places are in the words before
    return [*seen, [int(torch.count_nonzero(words)), int(torch.count_nonzero(touched))]]


def test_a_tensor_above_two_gib() -> None:
    expected = [[1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7], [4, 6]]
    assert ranks(2).run(past_two_gib, timeout=100) == [expected] * 2

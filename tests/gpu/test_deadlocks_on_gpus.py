"""Calls of two groups that two ranks issue in opposite orders, on two GPUs: named on both, and nothing hangs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpu.test_two_gpus import both, until_raised
from gpu.world import NEEDS_GPU
from unisono.errors import CollectiveTimeout, DeadlockError, UnisonoError

pytestmark = [
    NEEDS_GPU,
    pytest.mark.timeout(120),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs"),
]
SMALL, LARGE = 1000, 32 << 20  # elements: by a kernel, by NCCL


def two_groups() -> list[Any]:
    """The default group and one more, each with calls of both kinds behind it."""
    groups = [dist.group.WORLD, dist.new_group(group_desc="second")]
    for group in groups:
        for count in (SMALL, LARGE):
            dist.all_reduce(torch.ones(count, device="cuda"), group=group)
    torch.cuda.synchronize()
    dist.barrier()
    return groups


def crossed(rank: int, *counts: int, both_groups: bool = False) -> str:
    """The other group's call first on rank 1; the error is the default group's, or that of either."""
    groups = two_groups()
    xs = [torch.ones(count, device="cuda") for count in counts]
    for k in (0, 1) if rank == 0 else (1, 0):
        dist.all_reduce(xs[k], group=groups[k])
    torch.cuda.synchronize()
    return until_raised(groups=groups if both_groups else ())


def kernels_crossed(rank: int) -> str:
    return crossed(rank, SMALL, SMALL)


def nccl_crossed(rank: int) -> str:
    return crossed(rank, LARGE, LARGE, both_groups=True)


def kernel_and_nccl_crossed(rank: int) -> str:
    return crossed(rank, SMALL, LARGE)


def streams_crossed(rank: int) -> str:
    """Each group on a stream of its own: that is no deadlock."""
    groups, streams = two_groups(), [torch.cuda.Stream(), torch.cuda.Stream()]
    xs = [torch.ones(SMALL, device="cuda") for _ in groups]
    torch.cuda.synchronize()
    for k in (0, 1) if rank == 0 else (1, 0):
        with torch.cuda.stream(streams[k]):
            dist.all_reduce(xs[k], group=groups[k])
    torch.cuda.synchronize()
    return f"{[x.sum().item() for x in xs]}, {until_raised(1.0)}"


def graph_of(groups: list[Any], order: tuple[int, int]) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """The replay of a graph with a call of each group, and what they sum."""
    xs = [torch.ones(SMALL, device="cuda") for _ in groups]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for k in order:
            dist.all_reduce(xs[k], group=groups[k])
    return graph.replay, xs


def a_graph_of_two_groups(rank: int) -> str:
    replay, xs = graph_of(two_groups(), (0, 1))
    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    return f"{[x[0].item() for x in xs]}, {until_raised(1.0)}"


def graphs_crossed(rank: int) -> str:
    replay, _ = graph_of(two_groups(), (0, 1) if rank == 0 else (1, 0))
    replay()
    torch.cuda.synchronize()
    return until_raised()


def a_new_group_works(rank: int) -> str:
    try:
        kernels_crossed(rank)
    except UnisonoError as error:
        words = type(error).__name__
    dist.barrier()
    x = torch.ones(SMALL, device="cuda")
    dist.all_reduce(x, group=dist.new_group())
    return f"{words}, then {x[0].item()}"


def test_kernels_of_two_groups(tmp_path: Path) -> None:
    found = both(tmp_path, kernels_crossed)
    assert set(found) == {0, 1}
    for rank, (words, seconds, after) in found.items():
        assert words.startswith(f"{DeadlockError.__name__}: ")
        assert "ranks wait for each other on GPUs, and none can go on:" in words
        assert "all_reduce(float32 [1000], SUM), call no. 4 of the default group" in words
        assert "(second)" in words
        assert f"rank {1 - rank} has issued them the other way round" in words
        assert seconds < 10  # the group's own limit is 20 s
        assert after == 6


def at_the_limit(tmp_path: Path, fn: Any) -> list[str]:
    """The names of both ranks' errors, one of them a timeout."""
    found = both(tmp_path, fn, timeout=6.0)
    assert set(found) == {0, 1}
    assert all(seconds < 30 and after == 6 for _, seconds, after in found.values())
    named = [words.partition(":")[0] for words, _, _ in found.values()]
    assert CollectiveTimeout.__name__ in named
    return named


def test_what_nccl_does_not_end_is_named_on_all_ranks(tmp_path: Path) -> None:
    assert set(at_the_limit(tmp_path, nccl_crossed)) <= {"CollectiveTimeout", "PeerLostError"}


@pytest.mark.parametrize("fn", [kernel_and_nccl_crossed, graphs_crossed])
def test_what_is_found_at_the_limit(tmp_path: Path, fn: Any) -> None:
    """In the default group, which fails on one rank at least: on the other the second group may, alone."""
    assert set(at_the_limit(tmp_path, fn)) <= {"CollectiveTimeout", "PeerLostError", "nothing"}


def test_streams_of_their_own(tmp_path: Path) -> None:
    assert [found[0] for found in both(tmp_path, streams_crossed).values()] == ["[2000.0, 2000.0], nothing"] * 2


def test_a_graph_of_two_groups(tmp_path: Path) -> None:
    found = both(tmp_path, a_graph_of_two_groups)
    assert [words for words, _, _ in found.values()] == ["[8.0, 8.0], nothing"] * 2


def test_a_new_group_after_it(tmp_path: Path) -> None:
    found = both(tmp_path, a_new_group_works)
    assert [words for words, _, _ in found.values()] == ["DeadlockError, then 2.0"] * 2

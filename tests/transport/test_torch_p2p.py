"""A torch.distributed group as a transport: ranks within the group, and refusals."""

import pytest
import torch
import torch.distributed as dist

from ranks import ranks
from unisono.errors import UsageError
from unisono.run.front import named, run
from unisono.transport.torch_p2p import TorchP2P


def in_a_subgroup(rank: int, world_size: int) -> list[float] | str:
    group = dist.new_group([1, 3])
    try:
        if rank in (1, 3):
            transport, x = TorchP2P(group), torch.full((3,), float(rank))
            assert (transport.rank, transport.world_size) == (rank // 2, 2)
            run(named("ring", "all_reduce", 2), x, transport)
            with pytest.raises(UsageError, match="has no peer 2"):
                transport.send(2, x)
            return x.tolist()
        with pytest.raises(UsageError, match=f"global rank {rank} is not in this group"):
            TorchP2P(group)
        return "outside"
    finally:
        if rank in (1, 3):
            dist.destroy_process_group(group)


@pytest.mark.parametrize("backend", ["gloo", "unisono"])
def test_ranks_count_within_the_group(backend: str) -> None:
    assert ranks(4, backend=backend).run(in_a_subgroup) == ["outside", [4.0] * 3, "outside", [4.0] * 3]


def test_needs_a_group() -> None:
    with pytest.raises(UsageError, match="init_process_group first"):
        TorchP2P()

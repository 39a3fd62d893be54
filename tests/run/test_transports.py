"""Every algorithm over the other wires, with real processes: rings of shared memory, and Gloo's messages."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch.distributed as dist

from ranks import ranks
from run.cases import REDUCING, every_case
from run.test_every_algorithm import VARIANTS, over
from unisono.transport.shared_memory import SharedMemory
from unisono.transport.torch_p2p import TorchP2P


def over_rings(rank: int, world_size: int, path: str) -> list[str]:
    transport = SharedMemory(dist.FileStore(path, world_size), rank, world_size)
    try:
        cases = list(
            every_case(world_size, [*VARIANTS, {"numel": 0}, {"numel": 300_000}][: 4 if world_size == 3 else 3])
        )
        cases += [replace(case, deterministic=True) for case in cases if case.collective in REDUCING]
        return [line[:400] for line in over(transport, cases)]
    finally:
        transport.close()


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_every_algorithm_over_shared_memory(world_size: int, tmp_path: Path) -> None:
    assert list(chain(*ranks(world_size, group=False).run(over_rings, str(tmp_path / "store")))) == []


def over_gloo(rank: int, world_size: int) -> list[str]:
    transport = TorchP2P()
    return [line[:400] for line in over(transport, list(every_case(world_size, [*VARIANTS, {"numel": 0}])))]


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_every_algorithm_over_gloo(world_size: int) -> None:
    assert list(chain(*ranks(world_size, backend="gloo").run(over_gloo))) == []

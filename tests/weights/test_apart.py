"""What moves data between hosts: `backend=`, Gloo, unisono, or one that a user has registered; the same values."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from ranks import ranks
from unisono import weights
from unisono.errors import UsageError
from weights.live import Net, apart, attempt, blank, fill, replica, trainer, wrong

made: list[str] = []


def register() -> None:
    """Two backends of this process's own, one of each interface of torch's registry."""

    def plain(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        made.append("plain")
        return ProcessGroupGloo(store, rank, size, timeout)

    def extended(options: Any, given: Any) -> Any:
        made.append("extended")
        return ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)

    for name, create, api in (("own_plain", plain, False), ("own_extended", extended, True)):
        if name.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(name, create, extended_api=api, devices=["cpu"])
    if "OWN_GPU" not in dist.Backend._plugins:
        dist.Backend.register_backend("own_gpu", plain, devices=["cuda"])


def by_backend(rank: int, world_size: int, folder: str, backend: str) -> Any:
    register()
    made.clear()
    found: list[Any] = []
    with apart():
        if rank == 0:
            with trainer(folder, fill(Net(), 1), receivers=2, backend=backend, timeout=20) as sender:
                for version in (1, 2, 3):
                    fill(sender._source, version)
                    found.append(sender.push().version)
                return found, made
        model = blank(Net())
        with replica(folder, model, f"gen {rank}", timeout=20) as receiver:
            for version in (1, 2, 3):
                receiver.pull()
                found.append((receiver.version, wrong(model, version)))
            receiver.verify()
            return found, made


@pytest.mark.parametrize("backend", ["gloo", "Gloo", "unisono", "own_plain", "OWN_EXTENDED"])
def test_any_backend_for_cpu_tensors(backend: str, tmp_path: Path) -> None:
    """By its name in any case, as torch takes it."""
    own = [backend.lower().removeprefix("own_")] * backend.lower().startswith("own")
    sender, *receivers = ranks(3, group=False).run(by_backend, str(tmp_path), backend)
    assert sender == ([1, 2, 3], own)
    assert receivers == [([(1, []), (2, []), (3, [])], own)] * 2


def unknown_at_a_replica(rank: int, world_size: int, folder: str) -> Any:
    with apart():
        if rank == 0:
            register()
            with trainer(folder, fill(Net(), 1), backend="own_plain", timeout=20) as sender:
                return attempt(sender.push)
        dist.Backend._plugins.pop("OWN_PLAIN", None)
        with replica(folder, blank(Net()), timeout=20) as receiver:
            return attempt(receiver.pull)


def test_a_backend_that_a_replica_does_not_have(tmp_path: Path) -> None:
    (kind, sent, *_), (own, got, *_) = ranks(2, group=False).run(unknown_at_a_replica, str(tmp_path))
    assert [kind, own] == ["UpdateError", "UsageError"]
    assert "backend='own_plain': expected one that moves CPU tensors between hosts" in got
    assert "replica 'gen' rank 0" in sent
    assert "backend='own_plain'" in sent


@pytest.mark.parametrize("backend", ["nccl", "own_gpu", "no such", None, 5])
def test_what_is_no_backend_for_cpu_tensors(backend: Any) -> None:
    register()
    with pytest.raises(UsageError) as error:
        weights.Sender("tcp://127.0.0.1:0", {}, backend=backend)
    words = f"backend={backend!r}: expected one that moves CPU tensors between hosts, of this process's gloo"
    assert words in str(error.value)

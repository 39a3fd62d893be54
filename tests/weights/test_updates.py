"""Updates between processes: values, versions, reports, through shared memory and through a group of Gloo."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import ranks
from unisono import weights
from weights.live import Net, apart, blank, fill, replica, trainer, value, wrong

BOTH = pytest.mark.parametrize("distant", [False, True], ids=["shared memory", "gloo"])


def three_versions(rank: int, world_size: int, folder: str, distant: bool, bucket: int, delta: bool) -> Any:
    with apart(distant):
        if rank == 0:
            model = Net()
            with trainer(folder, model, receivers=world_size - 1, bucket=bucket, delta=delta) as sender:
                found = [sender.push() for version in (1, 2, 3) if fill(model, version)]
                return [str(found[0]).split(" in ")[0], [r.version for r in found], sender.checksums()]
        model = blank(Net())
        with replica(folder, model, f"gen-{rank}") as receiver:
            found = []
            for version in (1, 2, 3):
                report = receiver.pull()
                receiver.verify()
                found.append([report.version, receiver.version, wrong(model, version)])
            return [found, receiver.checksums()]


@BOTH
@pytest.mark.parametrize(("bucket", "delta"), [(1 << 20, False), (64, False), (64, True)])
def test_every_version_arrives(distant: bool, bucket: int, delta: bool, tmp_path: Path) -> None:
    sender, *replicas = ranks(3, group=False).run(three_versions, str(tmp_path), distant, bucket, delta)
    assert sender[:2] == ["version 1: 7 tensors, 752 B to 2 receivers", [1, 2, 3]]
    assert replicas == [[[[1, 1, []], [2, 2, []], [3, 3, []]], sender[2]]] * 2


def some_change(rank: int, world_size: int, folder: str, distant: bool) -> Any:
    with apart(distant):
        if rank == 0:
            model = fill({f"layer.{i}": torch.empty(100) for i in range(9)}, 1)
            with trainer(folder, model, delta=True, bucket=1200) as sender:
                found = [sender.push()]
                model["layer.4"].fill_(7)
                found += [sender.push(), sender.push()]
                return [[r.tensors, r.skipped, r.moved] for r in found]
        model = blank({f"layer.{i}": torch.empty(100) for i in range(9)})
        with replica(folder, model) as receiver:
            for _ in range(3):
                receiver.pull()
            receiver.verify()
            return wrong(model, 1, {"layer.4": torch.full((100,), 7.0)})


@BOTH
def test_a_delta_moves_what_has_changed(distant: bool, tmp_path: Path) -> None:
    found = ranks(2, group=False).run(some_change, str(tmp_path), distant)
    assert found == [[[9, 0, 3600], [1, 8, 400], [0, 9, 0]], []]


def from_shared(rank: int, world_size: int, folder: str, distant: bool) -> Any:
    with apart(distant):
        if rank == 0:
            model = weights.share(fill(Net(30, 40, 50), 1))
            tied = model.up.weight.untyped_storage().data_ptr() == model.norm.bias.untyped_storage().data_ptr()
            with trainer(folder, model, receivers=2, bucket=4096) as sender:
                found = [sender.push().version for version in (1, 2, 3) if fill(model, version)]
                fill(model, 4)
                update = sender.push(background=True)
                fill(model, 5)
                return [found, tied, update.wait().version, update.wait().snapshot > 0]
        model = blank(Net(30, 40, 50))
        with replica(folder, model, f"gen-{rank}") as receiver:
            found = []
            for version in (1, 2, 3, 4):
                receiver.pull()
                receiver.verify()
                found += wrong(model, version)
            return found


@BOTH
def test_shared_tensors_are_read_where_they_lie(distant: bool, tmp_path: Path) -> None:
    found = ranks(3, group=False).run(from_shared, str(tmp_path), distant)
    assert found == [[[1, 2, 3], True, 4, True], [], []]


def quantised(rank: int, world_size: int, folder: str, distant: bool) -> Any:
    whole = value("w", (6, 8), 3) - 40
    scale = whole.abs().amax(1, keepdim=True) / 127
    with apart(distant):
        if rank == 0:
            rules = [weights.quantize("w", torch.int8, scale="w_scale")]
            with trainer(folder, {"w": whole}, rules=rules) as sender:
                return sender.push().tensors
        model = {"w": torch.zeros(6, 8, dtype=torch.int8), "w_scale": torch.zeros(6, 1)}
        with replica(folder, model) as receiver:
            receiver.pull()
        return [torch.equal(model["w_scale"], scale), torch.equal(model["w"], (whole / scale).round().to(torch.int8))]


@BOTH
def test_quantised_on_the_way(distant: bool, tmp_path: Path) -> None:
    assert ranks(2, group=False).run(quantised, str(tmp_path), distant) == [2, [True, True]]

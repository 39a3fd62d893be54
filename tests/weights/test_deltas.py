"""Deltas version after version: whatever part of a tensor changes, and after updates that were given up."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import ranks
from unisono import weights
from unisono.weights import Plan
from weights.live import apart, attempt, replica, trainer

SIZES = {"one": 1, "small": 60, "cut": 1000, "other": 300, "cut in more": 2304}
BUCKET = 1024
CHANGES: list[dict[str, list[int]]] = [
    {},
    {"cut": [0]},
    {"cut": [999], "one": [0]},
    {},
    {"cut in more": [0, 300, 2303], "other": [299]},
    {"cut": [256, 511, 512], "cut in more": [1024], "small": [59]},
    {name: [0] for name in SIZES},
]
"""The elements that change from each version to the next."""


class Refuses(weights.ModuleEngine):
    """An engine that loads nothing while it ``refuses``."""

    refuses = False

    def load(self, bucket: Mapping[str, Tensor]) -> None:
        if self.refuses:
            raise ValueError("not now")


def nbytes_of(plan: Plan | None, changed: Mapping[str, list[int]]) -> int:
    """Bytes of the pieces in which some element has changed."""
    assert plan is not None
    pieces = [piece for chunk in plan.chunks for piece in chunk.pieces]
    hit = [any(at <= place < at + n for place in changed.get(name, ())) for name, (at,), (n,) in pieces]
    return sum(4 * n for (_, _, (n,)), each in zip(pieces, hit, strict=True) if each)


def version_after_version(rank: int, world_size: int, folder: str, distant: bool, shared: bool, fails: bool) -> Any:
    model = {name: torch.arange(float(size)) * (1 - rank) for name, size in SIZES.items()}
    sums, wrong = [], list[Any]()
    with apart(distant):
        if rank == 0:
            source = weights.share(model) if shared else model
            with trainer(folder, source, delta=True, bucket=BUCKET) as sender:
                sender.push()
                for changed in CHANGES:
                    for name, places in changed.items():
                        model[name][places] += 0.5
                    if fails and changed and attempt(sender.push)[0] != "UpdateError":
                        wrong.append(changed)
                    report = sender.push()
                    if report.moved != nbytes_of(sender.plan, changed):
                        wrong.append((changed, report))
                    sums.append(sender.checksums())
        else:
            engine = Refuses(model)
            with replica(folder, engine if fails else model) as receiver:
                receiver.pull()
                for changed in CHANGES:
                    if fails and changed:
                        engine.refuses = True
                        if attempt(receiver.pull)[0] != "ValueError":
                            wrong.append(changed)
                        engine.refuses = False
                    receiver.pull()
                    receiver.verify()
                    sums.append(receiver.checksums())
    return wrong, sums, {name: tensor.tolist() for name, tensor in model.items()}


@pytest.mark.parametrize("fails", [False, True], ids=["", "fails first"])
@pytest.mark.parametrize(("distant", "shared"), [(False, False), (False, True), (True, False)])
def test_any_part_changes(distant: bool, shared: bool, fails: bool, tmp_path: Path) -> None:
    sender, receiver = ranks(2, group=False).run(version_after_version, str(tmp_path), distant, shared, fails)
    assert sender[0] == receiver[0] == []
    assert sender[1:] == receiver[1:]

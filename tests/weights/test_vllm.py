"""The adapter for vLLM, with a stand-in for its worker: a model of fused tensors with the `load_weights` of vLLM's."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import ranks
from unisono import weights
from unisono.weights.vllm import ModelEngine, WorkerExtension
from weights.live import attempt, fill, meeting, trainer, value

SHAPES = {"q.weight": (4, 3), "k.weight": (2, 3), "v.weight": (2, 3), "out.weight": (3, 4)}


class StandIn:
    """Fuses what a checkpoint has in three tensors."""

    def __init__(self) -> None:
        self.qkv, self.out = torch.zeros(8, 3), torch.zeros(3, 4)
        self.calls = 0

    def load_weights(self, pairs: Iterable[tuple[str, Tensor]]) -> set[str]:
        self.calls += 1
        places = {"q.weight": self.qkv[:4], "k.weight": self.qkv[4:6], "v.weight": self.qkv[6:], "out.weight": self.out}
        return {name for name, tensor in pairs if places[name].copy_(tensor) is not None}


class Worker(WorkerExtension):
    """As vLLM mixes the extension into its own class."""

    def __init__(self, rank: int) -> None:
        self.rank, self.model_runner = rank, SimpleNamespace(model=StandIn())


def run(rank: int, world_size: int, folder: str) -> Any:
    checkpoint = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    path = f"{folder}/layout-{rank}.json"
    weights.layout(checkpoint, group="self").save(path)
    if rank == 0:
        with trainer(folder, checkpoint, receivers=2) as sender:
            reports = [sender.push() for version in (1, 2) if fill(checkpoint, version)]
            return [[report.version for report in reports], sorted(reports[1].receivers), sender.checksums()]
    worker = Worker(rank)
    early = attempt(worker.pull_weights)[0]
    worker.start_weight_updates(meeting(folder), path)
    found = []
    for version in (1, 2):
        shown, model = worker.pull_weights(), worker.model_runner.model
        qkv = torch.cat([value(name, SHAPES[name], version) for name in ("q.weight", "k.weight", "v.weight")])
        found.append([shown, torch.equal(model.qkv, qkv), torch.equal(model.out, value("out.weight", (3, 4), version))])
    sums = worker.weight_checksums()
    worker.stop_weight_updates()
    return [early, found, model.calls, sums]


def test_workers_show_whole_versions_in_the_tensors_that_they_have_fused(tmp_path: Path) -> None:
    sender, *workers = ranks(3, group=False).run(run, str(tmp_path))
    assert sender[:2] == [[1, 2], ["vllm 1", "vllm 2"]]
    assert workers == [["RuntimeError", [[1, True, True], [2, True, True]], 2, sender[2]]] * 2


def test_what_is_given_up_does_not_reach_the_model() -> None:
    model = StandIn()
    engine = ModelEngine(model, weights.layout({"out.weight": torch.zeros(3, 4)}))
    engine.load({"out.weight": torch.ones(3, 4)})
    engine.commit(None)
    engine.commit(1)
    assert torch.equal(model.out, torch.zeros(3, 4))
    with pytest.raises(RuntimeError, match="start_weight_updates"):
        Worker(0).weight_checksums()

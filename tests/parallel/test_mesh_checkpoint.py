"""A checkpoint written by one mesh, read by another: equal weights bit for bit, training that goes on."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from parallel.mesh_models import MAX_NORM, adam, batches, end, whole
from ranks import ranks
from unisono.errors import UsageError
from unisono.parallel.mesh import (
    MeshTransformer,
    ParallelDims,
    load_mesh_checkpoint,
    save_mesh_checkpoint,
)

STEPS = 1
PAIRS = [
    (ParallelDims(dp=2, tp=2), ParallelDims(pp=2, tp=2), "zb-v"),
    (ParallelDims(pp=2, tp=2), ParallelDims(tp=4), "zb-v"),
    (ParallelDims(tp=4), ParallelDims(dp=2, pp=2), "1f1b"),
    (ParallelDims(pp=4), ParallelDims(sp=2, tp=2), "1f1b"),
]


def start(shape: ParallelDims, schedule: str, seed: int) -> tuple[MeshTransformer, torch.optim.Optimizer]:
    model = MeshTransformer(whole(seed=seed), shape.build_mesh(), schedule=schedule, microbatches=2)
    return model, adam(model.parameters())


def train(model: MeshTransformer, optimizer: torch.optim.Optimizer, steps: slice) -> list[float]:
    losses = []
    for windows in batches()[steps]:
        optimizer.zero_grad()
        losses.append(model.step(windows).item())
        model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
    return losses


def compare_weights(model: MeshTransformer, stored: dict[str, torch.Tensor]) -> None:
    """Every weight of this rank is its share of the whole in the checkpoint, bit for bit."""
    place = model.places["tp"].rank
    for name, parameter, split, _ in model.parts():
        full = stored[f"model.{name}"]
        assert torch.equal(parameter, full if split is None else split.take(full, place)), name


def whole_weights(folder: Path) -> dict[str, torch.Tensor]:
    """What torch's own reader finds in a checkpoint for a plain model, in this process alone."""
    state = {f"model.{name}": torch.zeros_like(weight) for name, weight in whole().state_dict().items()}
    load(state, checkpoint_id=str(folder), no_dist=True)
    return state


def on_ranks_hand_over(
    rank: int, world_size: int, pairs: list[tuple[ParallelDims, ParallelDims, str]], parent: Path
) -> None:
    """Train, save, load on another mesh, train on with both."""
    for number, (shape, other_shape, schedule) in enumerate(pairs):
        folder = parent / str(number)
        model, optimizer = start(shape, schedule, seed=3)
        train(model, optimizer, slice(STEPS))
        save_mesh_checkpoint(folder, model, optimizer)
        other, other_optimizer = start(other_shape, schedule, seed=5)
        load_mesh_checkpoint(folder, other, other_optimizer)
        stored = whole_weights(folder)
        compare_weights(model, stored)
        compare_weights(other, stored)
        assert all(torch.equal(weight, stored[f"model.{name}"]) for name, weight in other.full_state_dict().items())
        onward = slice(STEPS, STEPS + 2)
        assert train(other, other_optimizer, onward) == pytest.approx(train(model, optimizer, onward), rel=0, abs=1e-5)
        end(model.mesh)
        end(other.mesh)


def on_ranks_load(rank: int, world_size: int, folder: Path, shape: ParallelDims) -> list[float]:
    """Go on from a checkpoint of some mesh of other ranks."""
    model, optimizer = start(shape, "1f1b", seed=5)
    load_mesh_checkpoint(folder, model, optimizer)
    compare_weights(model, whole_weights(folder))
    losses = train(model, optimizer, slice(STEPS, STEPS + 2))
    end(model.mesh)
    return losses


@pytest.mark.parametrize(("backend", "pairs"), [("unisono", PAIRS), ("gloo", PAIRS[:1])], ids=["unisono", "gloo"])
def test_what_one_mesh_saves_another_loads(
    tmp_path: Path, backend: str, pairs: list[tuple[ParallelDims, ParallelDims, str]]
) -> None:
    ranks(4, backend=backend).run(on_ranks_hand_over, pairs, tmp_path)
    two = ranks(2, backend=backend).run(on_ranks_load, tmp_path / "0", ParallelDims(pp=2))
    one = ranks(1, backend=backend).run(on_ranks_load, tmp_path / "0", ParallelDims())
    assert two[0] == two[1] == pytest.approx(one[0], rel=0, abs=1e-5)


def on_ranks_refuse(rank: int, world_size: int, folder: Path) -> list[str]:
    model, optimizer = start(ParallelDims(tp=2), "1f1b", seed=3)
    save_mesh_checkpoint(folder / "whole", model, optimizer)
    said = []
    larger = MeshTransformer(whole(layers=5), model.mesh, microbatches=1)
    for where, reader in ((folder / "nowhere", model), (folder / "whole", larger)):
        with pytest.raises(UsageError) as refusal:
            load_mesh_checkpoint(where, reader, adam(reader.parameters()))
        said.append(str(refusal.value))
    end(model.mesh)
    return said


def test_what_is_no_checkpoint_of_this_model_is_refused_on_every_rank(tmp_path: Path) -> None:
    said = ranks(2).run(on_ranks_refuse, tmp_path)
    assert said[0] == said[1]
    assert "there is no checkpoint in" in said[0][0]
    assert "the model's blocks.4.attention_norm.weight is [16], but the checkpoint in" in said[0][1]
    assert all("\n" not in words for words in said[0])

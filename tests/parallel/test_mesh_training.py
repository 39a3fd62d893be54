"""A transformer over a mesh against the same transformer in one process, for every way to factor the ranks."""

from itertools import product
from math import prod
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from parallel.mesh_models import CONTEXT, MAX_NORM, ROWS, STEPS, Reference, adam, batches, end, one_process, whole
from ranks import ranks
from unisono.algorithms.pipelines import usual_stages_per_rank
from unisono.errors import MismatchError, UsageError
from unisono.parallel.mesh import MeshTransformer, ParallelDims


class Case(NamedTuple):
    shape: ParallelDims
    schedule: str = "1f1b"
    steps: int = STEPS

    def __str__(self) -> str:
        return f"{self.shape} {self.schedule}"

    @property
    def layers(self) -> int:
        """As few as there are stages, but two at least."""
        return max(2, self.shape.pp * usual_stages_per_rank(self.schedule))


def meshes(world_size: int, axes: int) -> list[ParallelDims]:
    """All meshes of so many ranks over the first ``axes`` of dp, tp, pp, sp."""
    return [ParallelDims(*n) for n in product(range(1, world_size + 1), repeat=axes) if prod(n) == world_size]


FOUR = [Case(shape) for shape in meshes(4, axes=4)]  # ten
EIGHT = [Case(shape, steps=3) for shape in meshes(8, axes=3)]  # ten
OTHER_SCHEDULES = [
    Case(ParallelDims(tp=2, pp=2), "zb-v", 4),
    Case(ParallelDims(dp=2, pp=2), "interleaved", 4),
    Case(ParallelDims(sp=2, pp=2), "zb-h1", 4),
]
ON_GLOO = [Case(ParallelDims(dp=2, pp=2)), Case(ParallelDims(tp=2, sp=2)), Case(ParallelDims(tp=2, pp=2), "zb-v", 4)]


def on_ranks_train(rank: int, world_size: int, cases: list[Case], references: dict[int, Reference]) -> list[str]:
    """Train on every mesh; the gradients of the first step, and all losses and norms, are those of one process."""
    done = []
    for case in cases:
        mesh, wanted = case.shape.build_mesh(), references[case.layers]
        microbatches = 1 if case.shape.pp == 1 else 2
        model = MeshTransformer(whole(case.layers), mesh, schedule=case.schedule, microbatches=microbatches)
        optimizer = adam(model.parameters())
        losses, norms = [], []
        for windows in batches()[: case.steps]:
            optimizer.zero_grad()
            losses.append(model.step(windows).item())
            if len(losses) == 1:
                _compare_gradients(model, wanted.gradients, str(case))
            norms.append(model.clip_grad_norm_(MAX_NORM).item())
            optimizer.step()
        assert losses == pytest.approx(wanted.losses[: case.steps], rel=0, abs=1e-5), str(case)
        assert norms == pytest.approx(wanted.norms[: case.steps], rel=1e-4), str(case)
        assert model.evaluate(windows).item() < losses[-1]
        end(mesh)
        done.append(str(case))
    return done


def _compare_gradients(model: MeshTransformer, wanted: dict[str, torch.Tensor], mesh: str) -> None:
    place = model.places["tp"].rank
    for name, parameter, split, _ in model.parts():
        mine = wanted[name] if split is None else split.take(wanted[name], place)
        torch.testing.assert_close(parameter.grad, mine, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{mesh} {n}: {m}")


@pytest.mark.parametrize(
    ("world_size", "backend", "cases"),
    [(4, "unisono", FOUR + OTHER_SCHEDULES), (4, "gloo", ON_GLOO), (8, "unisono", EIGHT)],
    ids=["4 ranks", "gloo", "8 ranks"],
)
def test_the_loss_curve_of_every_mesh_is_that_of_one_process(world_size: int, backend: str, cases: list[Case]) -> None:
    references = {layers: one_process(layers) for layers in {case.layers for case in cases}}
    done = ranks(world_size, backend=backend).run(on_ranks_train, cases, references, timeout=200)
    assert done == [[str(case) for case in cases]] * world_size


def on_ranks_accumulate(rank: int, world_size: int, wanted: dict[str, torch.Tensor]) -> None:
    """Gradients of a second step are added to those of the first, which have been summed over the ranks already."""
    windows = batches()[0]
    for shape in (ParallelDims(dp=2, pp=2), ParallelDims(dp=2, sp=2)):
        mesh = shape.build_mesh()
        model = MeshTransformer(whole(2), mesh)
        model.step(windows)
        with pytest.raises(UsageError, match="does not fill"):
            model.step(windows[:0])
        model.step(windows)
        _compare_gradients(model, {name: 2 * gradient for name, gradient in wanted.items()}, str(shape))
        end(mesh)


def test_gradients_accumulate_over_steps() -> None:
    ranks(4).run(on_ranks_accumulate, one_process(2).gradients)


def on_ranks_refuse(rank: int, world_size: int) -> list[str]:
    """What every rank is told of configurations that cannot be; the group works afterwards."""
    said = []
    for shape in (ParallelDims(dp=3), ParallelDims(dp=2, tp=2, pp=2), ParallelDims(dp=4, tp=0)):
        with pytest.raises(UsageError) as refusal:
            shape.build_mesh()
        said.append(str(refusal.value))
    with pytest.raises(MismatchError) as mismatch:
        (ParallelDims(dp=2, tp=2) if rank else ParallelDims(dp=4)).build_mesh()
    said.append(str(mismatch.value))
    with pytest.raises(UsageError, match=r"a mesh with axes .*'dp', 'tp'.*: make it by ParallelDims.build_mesh"):
        ParallelDims.of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    pipe = ParallelDims(pp=4).build_mesh()
    tensor = ParallelDims(tp=4).build_mesh()
    for mesh, layers, heads, options in (
        (pipe, 3, 2, {}),
        (pipe, 4, 2, {"schedule": "zb-v"}),
        (pipe, 4, 2, {"microbatches": 0}),
        (tensor, 4, 2, {}),
        (tensor, 4, 8 if rank else 4, {}),
        (tensor, 4, 4, {"microbatches": 1 + rank}),
    ):
        model = whole(layers)
        model.heads = heads
        with pytest.raises((UsageError, MismatchError)) as failure:
            MeshTransformer(model, mesh, **options)
        said.append(str(failure.value))
    model = MeshTransformer(whole(), tensor)
    with pytest.raises(UsageError, match=rf"shape \[{ROWS}, {CONTEXT}\], expected \[sequences, {CONTEXT + 1}\]"):
        model.step(torch.zeros(ROWS, CONTEXT))
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size
    end(pipe)
    end(tensor)
    return said


def test_what_cannot_be_split_is_one_error_on_every_rank() -> None:
    said = ranks(4).run(on_ranks_refuse)
    assert all(words == said[0] for words in said)
    for words, expected in zip(
        said[0],
        [
            "dp · tp · pp · sp = 3 · 1 · 1 · 1 has 3 ranks, not 4",
            "2 · 2 · 2 · 1 has 8 ranks, not 4",
            "tp = 0, expected 1 or more",
            "expected one for all: rank 0: the mesh dp4, rank 1: the mesh dp2 tp2",
            "4 stages for 3 layers",
            "8 stages for 4 layers",
            "0 microbatches",
            "2 attention heads do not divide by tp = 4",
            "different configurations",
            "different configurations",
        ],
        strict=True,
    ):
        assert expected in words
        assert "\n" not in words

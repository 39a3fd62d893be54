"""Layouts found by looking: what `layout` says of a model's tensors is where their values really are."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import unisono.weights as w
from ranks import ranks
from unisono.errors import MismatchError, UsageError
from unisono.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from unisono.weights import holdings
from unisono.weights.inspection import inspect, local_tensors, named_tensors
from unisono.weights.layout import Layout, merge
from weights.moving import bits, held


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def test_a_module_has_parameters_and_persistent_buffers() -> None:
    found = w.layout(Model())
    assert found.names == ("steps", "embed.weight", "head.weight")
    assert found.ties == {"head.weight": "embed.weight"}
    assert (found["steps"].shape, found["steps"].dtype) == ((), torch.int64)
    assert found.nbytes == 8 + 60


def test_meta_tensors_have_the_same_layout() -> None:
    with torch.device("meta"):
        model = Model()
    assert w.layout(model) == w.layout(Model())


def test_views_of_one_storage_are_tied_only_if_they_are_the_same() -> None:
    base = torch.empty(4, 4)
    assert w.layout({"a": base, "b": base[:2], "c": base.t(), "d": base.view(4, 4)}).ties == {"d": "a"}
    assert w.layout({"a": torch.empty(0), "b": torch.empty(0)}).ties == {}


class Extra(nn.Linear):
    """With extra state, and a hook that changes a state_dict."""

    def __init__(self, hook: Any = None) -> None:
        super().__init__(2, 3)
        if hook is not None:
            self._register_state_dict_hook(hook)

    def get_extra_state(self) -> Tensor:
        return torch.ones(4)

    def set_extra_state(self, state: Tensor) -> None:
        raise AssertionError


def _detached(module: nn.Module, state: Any, prefix: str, meta: Any) -> None:
    state[prefix + "weight"] = state[prefix + "weight"].detach()


def _doubled(module: nn.Module, state: Any, prefix: str, meta: Any) -> None:
    state[prefix + "weight"] = 2 * state[prefix + "weight"]


def test_extra_state_does_not_travel() -> None:
    assert w.layout(Extra()).names == ("weight", "bias")
    assert w.layout({"a": torch.empty(2), "up._extra_state": 3, "_extra_state": torch.ones(2)}).names == ("a",)


def test_what_a_state_dict_detaches_is_still_the_modules_own() -> None:
    module = Extra(_detached)
    assert named_tensors(module)["weight"] is module.weight


def test_what_is_computed_for_a_state_dict_is_refused() -> None:
    """It would be received into a copy, and sent once as it is now and then never again."""
    with pytest.raises(UsageError, match="weight is computed for the state_dict, and no parameter or buffer"):
        w.layout(Extra(_doubled))


def test_a_tensor_without_elements_under_two_names_is_tied() -> None:
    """So it is on a rank whose part of a tied tensor is empty."""
    empty = torch.empty(0, 2)
    assert w.layout({"a": empty, "b": empty}).ties == {"b": "a"}


def test_declared_shards_of_one_process_are_the_whole() -> None:
    assert w.layout({"a": torch.empty(4, 2)}, shard={"a": 0}) == w.layout({"a": torch.empty(4, 2)})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (3, "expected a module or a mapping of names to tensors, got int"),
        ({"a": 3}, "a mapping must be of names to tensors, but 'a' is int"),
        ({3: torch.empty(2)}, "but 3 is Tensor"),
        (nn.LazyLinear(3), "weight has no shape yet: run the model once"),
        ({"a": torch.eye(3).to_sparse()}, "a is a torch.sparse_coo tensor: expected a dense one"),
    ],
)
def test_other_sources_are_refused(source: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        w.layout(source)
    assert words in str(caught.value)


def test_a_shard_that_matches_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match='shard: "up" matches no tensor; there are a'):
        w.layout({"a": torch.empty(2)}, shard={"up": 0})


def whole(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def differing(source: Any, wholes: dict[str, Tensor], found: Layout) -> list[str]:
    """Names of which the layout says something else than where this rank's values lie."""
    wanted, own = held(found, dist.get_rank(), wholes), local_tensors(source)
    names = {name for name, tensor in own.items() if tensor.numel()}
    wrong = [name for name in names | set(wanted) if bits(own[name]) != bits(wanted[name])]
    return wrong + [name for name in wholes if tuple(wholes[name].shape) != found[name].shape]


MESHES: dict[int, list[tuple[tuple[int, ...], list[Any]]]] = {
    2: [((2,), [Shard(0)]), ((2,), [Shard(1)]), ((2,), [Replicate()])],
    4: [
        ((4,), [Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Shard(1), Shard(0)]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(1), Replicate()]),
    ],
}


def dtensors(rank: int, world_size: int) -> list[str]:
    wrong = []
    for shape, placements in MESHES[world_size]:
        mesh = init_device_mesh("cpu", shape)
        for sizes in ((151, 3), (5, 2), (1, 7), (8, 8)):
            value = whole(*sizes)
            source = {"w": distribute_tensor(value, mesh, placements)}
            wrong += [f"{shape} {placements} {sizes}"] * bool(differing(source, {"w": value}, w.layout(source)))
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_dtensors_over_any_mesh(world_size: int) -> None:
    assert ranks(world_size).run(dtensors) == [[]] * world_size


def fully_sharded(rank: int, world_size: int) -> list[Any]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    out = []
    for two_dims in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 3), nn.Linear(3, 3))
        model[2].weight = nn.Parameter(torch.randn(3, 3))
        wholes = {name: t.detach().clone() for name, t in model.state_dict().items()}
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        if two_dims:
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            fully_shard(model, mesh=mesh["dp"])
        else:
            fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        found = w.layout(model)
        out.append([differing(model, wholes, found), found["0.weight"].parts[rank] != ()])
    return out


def test_fsdp2_alone_and_over_tensor_parallel_layers() -> None:
    assert ranks(4).run(fully_sharded) == [[[[], True], [[], True]]] * 4


def partial(rank: int, world_size: int) -> str:
    sums = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (world_size,)), [Partial()])
    try:
        inspect({"sums": sums})
    except UsageError as problem:
        return str(problem)
    return ""


def test_partial_placement_is_refused() -> None:
    for text in ranks(2).run(partial):
        assert text.startswith("sums is a DTensor with P")
        assert text.endswith("an unfinished sum: redistribute it to Replicate or Shard first")


def split_layers(rank: int, world_size: int) -> list[Any]:
    torch.manual_seed(0)
    fused, row, table = nn.Linear(4, 18), nn.Linear(7, 3), nn.Embedding(5, 4)
    model = nn.ModuleDict(
        {
            "qkv": ColumnParallelLinear.from_linear(fused, parts=3),
            "out": RowParallelLinear.from_linear(row),
            "embed": VocabParallelEmbedding.from_embedding(table),
        }
    )
    plain = {f"qkv.{n}": t for n, t in fused.state_dict().items()} | {
        f"out.{n}": t for n, t in row.state_dict().items()
    }
    plain |= {"embed.weight": table.weight.detach()}
    found = w.layout(model)
    return [differing(model, plain, found), len(found["qkv.weight"].parts[rank])]


def test_split_layers_of_unisono() -> None:
    assert ranks(2).run(split_layers) == [[[], 3]] * 2
    assert ranks(4).run(split_layers) == [[[], 3]] * 4


def declared(rank: int, world_size: int) -> list[Any]:
    value = whole(5, 4)
    own = {"rows": value[:3] if rank == 0 else value[3:], "all": value}
    found = w.layout(own, shard={"rows": 0})
    alone = w.layout(own, group="self")
    own_stage = w.layout({f"stage{rank}.w": value})
    return [
        differing(own, {"rows": value, "all": value}, found),
        alone.world_size,
        own_stage.names,
        own_stage.world_size,
    ]


def test_what_cannot_be_seen_is_declared() -> None:
    assert ranks(2).run(declared) == [[[], 1, ("stage0.w", "stage1.w"), 2]] * 2


def at_odds(rank: int, world_size: int) -> str:
    try:
        w.layout({"w": torch.empty(2 + rank, 3)})
    except MismatchError as problem:
        return str(problem)
    return ""


def test_ranks_at_odds_all_raise() -> None:
    first, second = ranks(2).run(at_odds)
    assert first == second
    assert "w: rank 0 has float32 [2, 3], rank 1 has float32 [3, 3]" in first
    assert 'shard={"w": 0}' in first.replace("'", '"')


def test_merging_what_ranks_found_is_the_layout() -> None:
    model = Model()
    assert merge([inspect(model)]) == w.layout(model)


@pytest.mark.parametrize("guarded", [True, False])
def test_another_shape_of_the_same_memory_is_seen(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not guarded:
        monkeypatch.setattr(holdings, "_guards_of", lambda tensors: None)
    memory = torch.zeros(24)
    model = {"a": memory.view(6, 4)}
    holder = holdings.Holdings()
    assert holder.look(model)
    for view in (memory.view(4, 6), memory.view(4, 6).t(), memory.view(6, 4)[:5], memory):
        model["a"].data = view
        assert holder.look(model)
        with torch.inference_mode():
            assert not holder.look(model)

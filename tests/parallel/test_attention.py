"""Attention split by heads equals the whole one, with whole activations or parts of the sequence outside."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ranks import ranks
from unisono.errors import UsageError
from unisono.parallel.sequence import ring_attention, sequence_positions, shard_sequence, unshard_sequence
from unisono.parallel.tensor import (
    ParallelAttention,
    full_state_dict,
    gather_from_region,
    scatter_to_region,
    sum_gradients,
)

HEADS, WIDTH = 6, 12


def layers() -> tuple[nn.Linear, nn.Linear]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64), nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def turn(heads: Tensor) -> Tensor:
    """A stand-in for rotary positions: later places are scaled more."""
    return heads * torch.arange(1, heads.shape[2] + 1, dtype=heads.dtype).view(-1, 1)


def alone(query_key_value: nn.Linear, out: nn.Linear, x: Tensor) -> Tensor:
    heads = query_key_value(x).view(*x.shape[:2], 3, HEADS, -1)
    query, key, value = heads.permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(turn(query), turn(key), value, is_causal=True)
    return out(mixed.transpose(1, 2).flatten(2))


def attend(rank: int, world_size: int, length: int, sequence: bool) -> None:
    whole = layers()
    model = ParallelAttention(*whole, HEADS, causal=True, rotate=turn, sequence_dim=1 if sequence else None)
    x, x_alone = (
        torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
        for _ in range(2)
    )
    y = gather_from_region(model(scatter_to_region(x, 1)), 1) if sequence else model(x)
    y_alone = alone(*whole, x_alone)
    torch.testing.assert_close(y, y_alone, rtol=1e-11, atol=1e-12)
    y.pow(2).sum().backward()
    y_alone.pow(2).sum().backward()
    torch.testing.assert_close(x.grad, x_alone.grad, rtol=1e-10, atol=1e-11)
    for parameter in model.parameters():
        parameter.data = parameter.grad
    gradients = full_state_dict(model)
    for name, layer in zip(("query_key_value", "out"), whole, strict=True):
        torch.testing.assert_close(gradients[f"{name}.weight"], layer.weight.grad, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(gradients[f"{name}.bias"], layer.bias.grad, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_attention_by_heads(world_size: int, backend: str) -> None:
    group = ranks(world_size, backend=backend)
    group.run(attend, 5, False)
    group.run(attend, 5, True)
    group.run(attend, 6, True)


def refused(rank: int, world_size: int) -> list[str]:
    messages = []
    query_key_value, out = layers()
    for arguments in ((query_key_value, out, 6), (query_key_value, nn.Linear(16, WIDTH), 8)):
        with pytest.raises(UsageError) as error:
            ParallelAttention(*arguments)
        messages.append(str(error.value))
    return messages


def test_heads_that_do_not_divide_are_refused_on_every_rank() -> None:
    first, *others = ranks(4).run(refused)
    assert others == [first] * 3
    assert first[0] == (
        "6 attention heads cannot be split over 4 ranks: the number of heads must be a multiple of the number of ranks"
    )
    assert "not 36 and 16" in first[1]


def over_two_axes(rank: int, world_size: int) -> None:
    """Heads over one axis of a mesh, the sequence over the other: the two compose without knowing of each other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "tensor"))
    sequence, tensor = mesh.get_group("sequence"), mesh.get_group("tensor")
    places = sequence_positions(7, sequence) + 1

    def turn_own(heads: Tensor) -> Tensor:
        return heads * places.to(heads.dtype).view(-1, 1)

    ring = partial(ring_attention, group=sequence, causal=True)
    whole = layers()
    model = ParallelAttention(*whole, HEADS, group=tensor, rotate=turn_own, attend=ring)
    sum_gradients(model, sequence)
    x = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    y = unshard_sequence(model(shard_sequence(x, 1, sequence)), 1, sequence)
    x_alone = x.detach().clone().requires_grad_()
    y_alone = alone(*whole, x_alone)
    torch.testing.assert_close(y, y_alone, rtol=1e-11, atol=1e-12)
    y.pow(2).sum().backward()
    y_alone.pow(2).sum().backward()
    torch.testing.assert_close(x.grad, x_alone.grad, rtol=1e-10, atol=1e-11)
    for parameter in model.parameters():
        parameter.data = parameter.grad
    gradients = full_state_dict(model)
    torch.testing.assert_close(gradients["query_key_value.weight"], whole[0].weight.grad, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(gradients["out.bias"], whole[1].bias.grad, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_heads_and_sequence_over_two_axes(backend: str) -> None:
    ranks(4, backend=backend).run(over_two_axes)

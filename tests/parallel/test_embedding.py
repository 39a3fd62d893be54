"""The split embedding trains, saves and loads as one process does, whatever its number of rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from parallel.refused import refused
from ranks import ranks
from unisono.parallel.tensor import (
    VocabParallelEmbedding,
    full_state_dict,
    gather_from_region,
    load_full_state_dict,
    parallel_cross_entropy,
    split_evenly,
)

WIDTH = 3


def embedding(rows: int, padding_idx: int | None = None) -> nn.Embedding:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Embedding(rows, WIDTH, padding_idx, dtype=torch.float64)


def train(rank: int, world_size: int, rows: int, padding_idx: int | None) -> list[Tensor]:
    """Three steps, saved whole after the first and loaded into a new layer; the rows left, and those of one process."""
    alone = embedding(rows, padding_idx)
    model = VocabParallelEmbedding.from_embedding(alone)
    tokens = torch.arange(rows)
    factors = torch.arange(1.0, rows + 1)[:, None]
    for step in range(3):
        if step == 1:
            state = full_state_dict(model)
            assert state["weight"].shape == (rows, WIDTH)
            model = VocabParallelEmbedding(rows, WIDTH, padding_idx, dtype=torch.float64)
            load_full_state_dict(model, state)
        for layer in (model, alone):
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
            optimizer.zero_grad()
            (layer(tokens) * factors).sum().backward()
            optimizer.step()
    assert model.weight.shape[0] == split_evenly(rows, world_size)[rank]
    return [full_state_dict(model)["weight"], alone.weight.detach()]


@settings(max_examples=10)
@given(st.integers(1, 4), st.integers(0, 6), st.data())
def test_trains_bit_for_bit(world_size: int, more: int, data: st.DataObject) -> None:
    rows = world_size + more
    padding_idx = data.draw(st.none() | st.integers(0, rows - 1))
    for split, alone in ranks(world_size).run(train, rows, padding_idx):
        assert torch.equal(split, alone)


def test_trains_bit_for_bit_on_gloo() -> None:
    for split, alone in ranks(2, backend="gloo").run(train, 5, None):
        assert torch.equal(split, alone)


def tied(rank: int, world_size: int, sequence: bool) -> None:
    """Embedding, tied logits and loss: the weight's gradient has both its parts."""
    alone = embedding(7)
    dim = 1 if sequence else None
    model = VocabParallelEmbedding.from_embedding(alone, sequence_dim=dim)
    generator = torch.Generator().manual_seed(4)
    tokens, targets = torch.randint(7, (2, 2, 5), generator=generator)
    hidden = model(tokens)
    whole = gather_from_region(hidden, 1) if sequence else hidden
    assert torch.equal(whole, alone(tokens))
    loss = parallel_cross_entropy(model.logits(hidden.tanh()), targets, 7)
    logits = nn.functional.linear(alone(tokens).tanh(), alone.weight)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    expected.backward()
    model.weight.data = model.weight.grad
    torch.testing.assert_close(full_state_dict(model)["weight"], alone.weight.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_tied_logits(backend: str) -> None:
    ranks(3, backend=backend).run(tied, False)
    ranks(3, backend=backend).run(tied, True)


def refusals(rank: int, world_size: int) -> list[str]:
    model = VocabParallelEmbedding(5, WIDTH)
    assert model(torch.zeros(0, 2, dtype=torch.int64)).shape == (0, 2, WIDTH)
    attempts = [
        lambda: model(torch.tensor([0, 5])),
        lambda: model(torch.tensor([[-1]])),
        lambda: VocabParallelEmbedding(1, WIDTH),
        lambda: VocabParallelEmbedding.from_embedding(nn.Embedding(5, 3, max_norm=1.0)),
    ]
    return refused(attempts)


def test_what_is_refused() -> None:
    first, second = ranks(2).run(refusals)
    assert first == second
    assert first[:2] == [f"token {token} is outside the vocabulary of 5: tokens are 0 … 4" for token in (5, -1)]
    assert first[2].startswith("the vocabulary = 1 cannot be split over 2 ranks")
    assert first[3] == "a vocabulary-parallel embedding has no max_norm: switch it off"

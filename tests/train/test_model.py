import math

import pytest
import torch
import torch.nn.functional as F

from train.small import SHAPE
from unisono.train.trainer import ByteTransformer


@pytest.fixture
def model() -> ByteTransformer:
    torch.manual_seed(3)
    return ByteTransformer(SHAPE)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(256, (2, SHAPE.context), generator=torch.Generator().manual_seed(1))


def test_no_position_sees_a_later_byte(model: ByteTransformer, tokens: torch.Tensor) -> None:
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_the_order_of_earlier_bytes_matters(model: ByteTransformer, tokens: torch.Tensor) -> None:
    swapped = tokens[:, [1, 0, *range(2, SHAPE.context)]]
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1])


def test_an_untrained_model_knows_nothing(model: ByteTransformer, tokens: torch.Tensor) -> None:
    loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.35)


def test_every_parameter_gets_a_gradient(model: ByteTransformer, tokens: torch.Tensor) -> None:
    model(tokens).logsumexp(-1).sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in model.parameters())


def test_generation_continues_the_prompt_and_repeats_with_its_seed(model: ByteTransformer) -> None:
    prompt = b"longer than the context of sixteen bytes"
    first = model.generate(prompt, 6, temperature=1.0, seed=5)
    assert len(first) == 6
    assert first == model.generate(prompt, 6, temperature=1.0, seed=5)
    assert first != model.generate(prompt, 6, temperature=1.0, seed=6)


def test_generation_at_low_temperature_takes_the_likeliest_byte(model: ByteTransformer) -> None:
    likeliest = int(model(torch.tensor([list(b"ab")]))[0, -1].argmax())
    assert model.generate(b"ab", 1, temperature=1e-4, seed=0) == bytes([likeliest])

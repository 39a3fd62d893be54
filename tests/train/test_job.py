import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from train.small import TEXT, small
from unisono.train.job import _rate
from unisono.train.launch import launch
from unisono.train.model import ByteTransformer
from unisono.train.settings import Outcome, Settings


def _run(settings: Settings) -> Outcome:
    return launch(settings, lambda records: None)


def _losses(outcome: Outcome) -> list[float]:
    return [record.loss for record in outcome.records]


def _one_process(settings: Settings) -> list[float]:
    """The same training without ranks, DDP or any code of the job: one model, the whole batch."""
    text = torch.tensor(list(TEXT[: int(len(TEXT) * 0.9)]))
    torch.manual_seed(settings.seed)
    model = ByteTransformer(settings.shape)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.05)
    generator = torch.Generator().manual_seed(settings.seed)
    context = settings.shape.context
    losses = []
    for step in range(1, settings.steps + 1):
        starts = torch.randint(len(text) - context, (settings.batch,), generator=generator)
        windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()])
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = settings.learning_rate * _rate(step / settings.steps)
        optimizer.step()
    return losses


@pytest.mark.parametrize(("ranks", "batch"), [(1, 3), (2, 6), (3, 5)])
def test_the_loss_curve_is_that_of_one_process_on_the_whole_batch(tmp_path: Path, ranks: int, batch: int) -> None:
    settings = small(tmp_path, ranks=ranks, batch=batch)
    assert _losses(_run(settings)) == pytest.approx(_one_process(settings), rel=1e-4)


def test_both_backends_give_the_same_curve(tmp_path: Path) -> None:
    ours, gloo = (_run(small(tmp_path, ranks=3, backend=backend)) for backend in ("unisono", "gloo"))
    assert _losses(ours) == pytest.approx(_losses(gloo), rel=1e-4)
    assert [loss for _, loss in ours.held_out] == pytest.approx([loss for _, loss in gloo.held_out], rel=1e-4)


def test_the_seed_decides_the_curve(tmp_path: Path) -> None:
    first, again, other = (_losses(_run(small(tmp_path, seed=seed))) for seed in (1, 1, 2))
    assert first == again
    assert first != pytest.approx(other, rel=1e-3)


def test_it_learns_the_text(tmp_path: Path) -> None:
    outcome = _run(small(tmp_path, steps=120, learning_rate=2e-2))
    assert outcome.held_out[0] == (0, pytest.approx(math.log(256), abs=0.5))
    assert outcome.held_out[-1][0] == 120
    assert outcome.held_out[-1][1] < outcome.unigram_entropy / 2


def test_an_outcome_is_complete(tmp_path: Path) -> None:
    outcome = _run(small(tmp_path, steps=12))
    assert [record.step for record in outcome.records] == list(range(1, 13))
    assert all(0 < record.sync_seconds < record.seconds for record in outcome.records)
    assert [steps for steps, _ in outcome.held_out] == [0, 2, 3, 4, 6, 8, 9, 10, 12]
    assert outcome.sample.startswith(b"The ")
    assert len(outcome.sample) == len(b"The ") + 5
    assert outcome.text_name == "text.txt"
    assert outcome.parameters == 256 * 12 + 2 * (12 + 12 * 36 + 12 * 12 + 12 + 12 * 48 + 48 * 12) + 12


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [_rate(step / 100) for step in range(101)]
    assert rates[0] == 0
    assert max(rates) == rates[10] > 0.9
    assert rates[100] == pytest.approx(0.05)

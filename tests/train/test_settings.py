from dataclasses import replace

import pytest

from unisono.errors import UsageError
from unisono.train.settings import ModelShape, Outcome, Settings, StepRecord


def test_the_defaults_are_fit_to_train_with() -> None:
    Settings().check()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": "carrier-pigeon"}, "unknown backend 'carrier-pigeon': expected one of unisono, gloo"),
        ({"ranks": 0}, "--ranks is 0, expected 1 or more"),
        ({"steps": -1}, "--steps is -1, expected 1 or more"),
        ({"batch": 0}, "--batch is 0, expected 1 or more"),
        ({"ranks": 5, "batch": 4}, "use --batch 5 or more"),
        ({"learning_rate": 0.0}, "--learning-rate is 0.0"),
        ({"learning_rate": float("nan")}, "--learning-rate is nan"),
        ({"learning_rate": float("inf")}, "--learning-rate is inf"),
        ({"seed": -1}, "--seed is -1"),
        ({"shape": ModelShape(layers=0)}, "--layers is 0, expected 1 or more"),
        ({"shape": ModelShape(width=100)}, "expected a multiple of 8"),
    ],
)
def test_a_value_that_cannot_be_trained_with_is_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        replace(Settings(), **changes).check()  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_outcome_counts_medians_and_shares() -> None:
    records = [StepRecord(1, 3.0, 9.0, 1.0), StepRecord(2, 2.0, 0.5, 0.25), StepRecord(3, 1.0, 0.5, 0.25)]
    outcome = Outcome(Settings(batch=4, shape=ModelShape(context=8)), "text", 1, 3.0, records, [(0, 5.0)], b"")
    assert outcome.step_seconds == 0.5
    assert outcome.tokens_per_second == 4 * 8 / 0.5
    assert outcome.sync_share == pytest.approx(1.5 / 10)

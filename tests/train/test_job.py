import math
import os
from pathlib import Path

import pytest

from ranks import ranks
from train.small import one_process, small
from unisono.train.job import _pin, _rate
from unisono.train.launch import launch
from unisono.train.settings import Outcome, Settings


def _run(settings: Settings) -> Outcome:
    return launch(settings, lambda records: None)


def _losses(outcome: Outcome) -> list[float]:
    return [record.loss for record in outcome.records]


@pytest.mark.parametrize(("ranks", "batch"), [(1, 3), (2, 6), (3, 5)])
def test_the_loss_curve_is_that_of_one_process_on_the_whole_batch(tmp_path: Path, ranks: int, batch: int) -> None:
    settings = small(tmp_path, ranks=ranks, batch=batch)
    assert _losses(_run(settings)) == pytest.approx(one_process(settings), rel=1e-4)


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


def on_ranks_pin(rank: int, world_size: int, environment: dict[str, str]) -> set[int]:
    """The cores that a rank keeps to; afterwards it has all again."""
    before, variables = os.sched_getaffinity(0), dict(os.environ)
    os.environ.update(environment)
    try:
        _pin(rank, world_size)
        return os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, before)
        os.environ.clear()
        os.environ.update(variables)


def test_ranks_that_fit_the_cores_keep_to_their_own() -> None:
    everything = os.sched_getaffinity(0)
    if len(everything) != os.cpu_count() or len(everything) < 2:
        pytest.skip("needs two cores, and no affinity set")
    own = ranks(2, group=False)
    first, second = own.run(on_ranks_pin, {})
    assert len(first) == len(second) == len(everything) // 2
    assert not first & second
    assert own.run(on_ranks_pin, {"UNISONO_PIN": "0"}) == [everything, everything]
    assert own.run(on_ranks_pin, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}) == [everything, everything]
    assert own.run(on_ranks_pin, {"LOCAL_WORLD_SIZE": str(len(everything) + 1)}) == [everything, everything]

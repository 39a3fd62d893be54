"""A regression guard of weight updates: ratios of the same run, against floors that noise does not reach.

Every other rank computes checksums without the compiled loops, which costs several times more: the claims are measured
by `unisono bench weights` on a calm machine.
"""

from pathlib import Path

import pytest

from ranks import ranks
from unisono.bench.result import Row
from unisono.bench.weights import WeightSettings, line, parse_pairs
from unisono.bench.weights_rank import measure_weights
from unisono.errors import UsageError

LARGE, SMALL = "300x7000 to 1", "300x100 to 1"


def bench(rank: int, world_size: int, settings: WeightSettings, meeting: str) -> list[Row]:
    found: list[Row] = []
    measure_weights(settings, rank, f"file://{meeting}", found.append)
    return found


def test_faster_than_a_loop_and_not_far_from_one_broadcast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = ((300, 7000), (300, 100))
    settings = WeightSettings(models, (1,), delta=0.01, reshard=((1, 1),), runs=5, seconds=0.5)
    rows = ranks(2, group=False).run(bench, settings, str(tmp_path / "meeting"))[0]
    assert [row.wrong for row in rows if row.contender == "weights"] == [0] * 8
    best = {(row.collective, row.contender): min(row.seconds) for row in rows}
    with capsys.disabled():
        print("", *(line(settings, rows[at : at + 4]) for at in range(0, len(rows), 4)), sep="\n")
    assert best[SMALL, "gloo"] > 3 * best[SMALL, "weights"]
    assert best[LARGE, "gloo"] > best[LARGE, "weights"]
    assert best[LARGE, "unchecked"] < 6 * best[LARGE, "flat"]
    assert best["300x7000 to 1, 3 changed", "weights"] < best[LARGE, "weights"]


def test_what_cannot_be_measured_is_one_line() -> None:
    assert parse_pairs("--reshard", " 2:2, 4:2", ":", "2:2") == ((2, 2), (4, 2))
    for given, words in (("300", "--tensors is '300'"), ("0x4", "--tensors is '0x4'")):
        with pytest.raises(UsageError, match=words):
            parse_pairs("--tensors", given, "x", "300x28000")
    for settings, words in (
        (WeightSettings(against=("nccl",)), "unknown contender of --against 'nccl'"),
        (WeightSettings(replicas=(0,)), r"--replicas is \[0\]"),
        (WeightSettings(delta=2.0), "--delta is 200%"),
        (WeightSettings(tensors=()), "--tensors needs"),
        (WeightSettings(runs=0), "--runs is 0"),
    ):
        with pytest.raises(UsageError, match=words):
            settings.validate()

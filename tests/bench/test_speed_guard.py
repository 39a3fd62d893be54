"""A regression guard: ratios to Gloo in the same run, against floors so low that noise does not reach them.

The claims themselves are far higher and measured on a calm machine (benchmarks/speed_against_gloo). What fails here has
become slower by a multiple. Of each contender the fastest of several short runs counts, which a busy machine spoils
least; a collective is judged by the geometric mean over the sizes.
"""

import os
from math import prod
from pathlib import Path

import pytest

from ranks import ranks
from unisono.bench.measure import run_rank
from unisono.bench.result import Rates, Row
from unisono.bench.settings import Contender, Settings
from unisono.units import show_nbytes, show_seconds

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "barrier", "broadcast", "send_recv")
FLOORS = {
    "compiled loops": dict(zip(COLLECTIVES, (2.0, 2.0, 2.0, 1.5, 2.0, 1.2, 1.0), strict=True)),
    "torch's operations": dict(zip(COLLECTIVES, (1.2, 1.2, 1.2, 0.8, 1.5, 0.8, 0.4), strict=True)),
}
FUSED = {"compiled loops": "now", "torch's operations": "0"}
SIZES = (8, 4 << 10, 64 << 10, 1 << 20)


def bench(rank: int, world_size: int, settings: Settings, fused: str, meeting: str) -> list[Rates | Row]:
    told: list[Rates | Row] = []
    before, os.environ["UNISONO_FUSED"] = os.environ["UNISONO_FUSED"], fused
    try:
        run_rank(settings, rank, f"file://{meeting}", told.append)
    finally:
        os.environ["UNISONO_FUSED"] = before
    return told


@pytest.mark.parametrize("way", FLOORS)
def test_faster_than_gloo(way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    contenders, floors = (Contender("unisono"), Contender("gloo")), FLOORS[way]
    settings = Settings(COLLECTIVES, 2, listed=SIZES, contenders=contenders, runs=9, warm_up=2, seconds=0.1)
    told = ranks(2, group=False).run(bench, settings, FUSED[way], str(tmp_path / "meeting"))[0]
    rows = [row for row in told if isinstance(row, Row)]
    ratios: dict[str, list[float]] = {name: [] for name in COLLECTIVES}
    lines = [f"{f'2 ranks, {way}':<25}   unisono      gloo   ratio"]
    for mine, gloo in zip(rows[::2], rows[1::2], strict=True):
        ratio = min(gloo.seconds) / min(mine.seconds)
        ratios[mine.collective].append(ratio)
        size = show_nbytes(mine.nbytes) if mine.nbytes else ""
        times = f"{show_seconds(min(mine.seconds)):>8}  {show_seconds(min(gloo.seconds)):>8}"
        lines.append(f"{mine.collective:<14}  {size:>7}  {times}  {ratio:6.1f}")
    means = {name: prod(found) ** (1 / len(found)) for name, found in ratios.items()}
    with capsys.disabled():
        print("", *lines, sep="\n")
    assert {name: round(mean, 2) for name, mean in means.items() if mean < floors[name]} == {}

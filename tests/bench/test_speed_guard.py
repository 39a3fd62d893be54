"""A regression guard: ratios to Gloo in the same run, against floors so low that noise does not reach them.

The claims themselves are far higher and measured on a calm machine (benchmarks/speed_against_gloo). What fails here has
become slower by a multiple. Of each contender the fastest of several short runs counts, which a busy machine spoils
least; a collective is judged by the geometric mean over the sizes.
"""

from math import prod

import pytest

from bench.test_measure import bench
from ranks import ranks
from unisono.bench.result import Row
from unisono.bench.settings import Contender, Settings
from unisono.units import show_nbytes, show_seconds

FLOORS = {"all_reduce": 1.2, "reduce_scatter": 1.2, "all_gather": 1.2, "broadcast": 1.0, "barrier": 1.5}
SIZES = (8, 4 << 10, 64 << 10, 1 << 20)


def test_faster_than_gloo(capsys: pytest.CaptureFixture[str]) -> None:
    contenders = (Contender("unisono"), Contender("gloo"))
    settings = Settings(tuple(FLOORS), 2, listed=SIZES, contenders=contenders, runs=9, warm_up=2, seconds=0.4)
    rows = [row for row in ranks(2).run(bench, settings)[0] if isinstance(row, Row)]
    ratios: dict[str, list[float]] = {name: [] for name in FLOORS}
    lines = []
    for mine, gloo in zip(rows[::2], rows[1::2], strict=True):
        ratio = min(gloo.seconds) / min(mine.seconds)
        ratios[mine.collective].append(ratio)
        size = show_nbytes(mine.nbytes) if mine.nbytes else ""
        times = f"{show_seconds(min(mine.seconds)):>8}  {show_seconds(min(gloo.seconds)):>8}"
        lines.append(f"{mine.collective:<14}  {size:>7}  {times}  {ratio:6.1f}")
    means = {name: prod(found) ** (1 / len(found)) for name, found in ratios.items()}
    with capsys.disabled():
        print(f"\n2 ranks, fastest of {settings.runs}    unisono      gloo   ratio", *lines, sep="\n")
    assert {name: round(mean, 2) for name, mean in means.items() if mean < FLOORS[name]} == {}

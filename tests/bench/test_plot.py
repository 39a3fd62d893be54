from dataclasses import replace
from pathlib import Path

import pytest

from unisono.bench.plot import save_plot
from unisono.bench.result import Machine, Rates, Result, Row
from unisono.errors import UsageError

ROW = Row("all_reduce", "unisono", 8, 2, "float32", "sum", "in", 2, 10, (1e-5, 2e-5, 3e-5), 0, 1.0, 1e-9)


def test_every_collective_is_a_row_of_panels(tmp_path: Path) -> None:
    rows = [replace(ROW, nbytes=8 << i, contender=name) for i in range(4) for name in ("unisono", "gloo")]
    barrier = replace(ROW, collective="barrier", nbytes=0, bound=0.0, op="none")
    heights = []
    for some in (rows, [*rows, barrier]):
        save_plot(tmp_path / "a.png", Result({"pin": True}, Machine(cores=2), Rates(), some))
        png = (tmp_path / "a.png").read_bytes()
        assert png.startswith(b"\x89PNG")
        heights.append(int.from_bytes(png[20:24]))
    assert heights[1] == heights[0] + round(4.3 * 120)


def test_nothing_measured_is_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to draw"):
        save_plot(tmp_path / "a.png", Result({}, Machine(), Rates(), [replace(ROW, seconds=(), refused="no")]))

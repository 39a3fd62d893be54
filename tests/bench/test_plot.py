from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from unisono.bench import plot
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


def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: list[Row]) -> Figure:
    """The figure of one collective that would be written."""
    figures: list[Figure] = []
    monkeypatch.setattr(plot, "save_figure", lambda figure, path: figures.append(figure))
    save_plot(tmp_path / "a.png", Result({}, Machine(cores=2), Rates(), rows))
    figures[0].draw_without_rendering()
    return figures[0]


def test_one_rank_has_no_bus_bandwidth(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [replace(ROW, nbytes=8 << i, ranks=1, factor=0.0, bound=0.0) for i in range(3)]
    figure = drawn(monkeypatch, tmp_path, rows)
    assert [panel.axison for panel in figure.axes] == [True, False]
    assert figure.get_suptitle().startswith("1 rank ")


def test_a_bound_at_one_size_is_seen_in_both_panels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for panel in drawn(monkeypatch, tmp_path, [replace(ROW, bound=5e-6)]).axes:
        (bound,) = [line for line in panel.get_lines() if line.get_label() == "bound"]
        assert bound.get_marker() == "_"


@pytest.mark.parametrize("spread", [1.01, 1.5, 4.0, 9.0, 40.0, 1e4])
def test_every_axis_has_ticks_and_each_of_them_a_unit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spread: float
) -> None:
    rows = [replace(ROW, nbytes=8 * 3**i, seconds=(6.1e-6 * spread**i,)) for i in range(2)]
    for panel in drawn(monkeypatch, tmp_path, rows).axes:
        assert [text.get_text() for text in panel.get_xticklabels()] == ["8 B", "24 B"]
        low, high = panel.get_ylim()
        labels = [t.get_text() for t in panel.get_yticklabels() if low <= t.get_position()[1] <= high]
        assert len(labels) >= 2
        assert "busbw" in panel.get_ylabel() or all(label.endswith("s") for label in labels)
        assert not any(text.get_text() for text in panel.get_yticklabels(minor=True))


def test_a_file_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"^cannot write /dev/full: No space left on device$"):
        save_plot(Path("/dev/full"), Result({}, Machine(), Rates(), [ROW]))

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from unisono.errors import UsageError
from unisono.train.report import Display, comparison, printable, save_plot, summary
from unisono.train.settings import ModelShape, Outcome, Settings, StepRecord

SETTINGS = Settings(backend="unisono", steps=20, batch=4, shape=ModelShape(context=100))


def _outcome(backend: str, step_seconds: float, shift: float = 0.0) -> Outcome:
    records = [StepRecord(step, 3.0 - step / 10 + shift, step_seconds, step_seconds / 4) for step in range(1, 21)]
    held_out = [(0, 5.5), (10, 2.5), (20, 1.25 + shift)]
    return Outcome(replace(SETTINGS, backend=backend), "a text", 1234, 3.2, records, held_out, b"The end")


def _lines(renderable: object) -> list[str]:
    console = Console(file=io.StringIO(), width=120)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.replace("│", " ").split()) for line in console.file.getvalue().splitlines()]


def test_the_summary_has_the_numbers_of_the_run() -> None:
    lines = _lines(summary(_outcome("unisono", 0.125)))
    assert "a text, 4 ranks, 20 steps" in lines
    for line in [
        "parameters 1,234",
        "training loss, last step (nats per byte) 1.0000",
        "held-out loss (nats per byte) 1.2500",
        "byte frequencies alone would give 3.2000",
        "step time, median (ms) 125.0",
        "tokens per second, all ranks 3,200",
        "share of time communicating 25.0%",
    ]:
        assert line in lines


def test_the_comparison_tells_differences_and_the_speed_up() -> None:
    lines = _lines(comparison(_outcome("unisono", 0.125), _outcome("gloo", 0.25, shift=0.001)))
    for line in [
        "training loss, last step (nats per byte) 1.0000 1.0010 -1.0e-03",
        "held-out loss (nats per byte) 1.2500 1.2510 -1.0e-03",
        "step time, median (ms) 125.0 250.0",
        "largest difference of the loss in any step 1.0e-03",
        "speed-up of a step, unisono over gloo 2.00×",
    ]:
        assert line in lines


def test_away_from_a_terminal_every_tenth_is_a_line() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=40)
    with Display(console, SETTINGS) as display:
        for first in range(0, 20, 5):
            display.show(_outcome("unisono", 0.125).records[first : first + 5])
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["5/20", "10/20", "15/20", "20/20"]
    assert lines[-1] == "unisono 20/20 loss 1.000 · 3,200 tokens/s · 25% communicating"


def test_on_a_terminal_the_bar_ends_complete() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with Display(console, SETTINGS) as display:
        display.show(_outcome("unisono", 0.125).records)
    assert isinstance(console.file, io.StringIO)
    assert "20/20" in console.file.getvalue()
    assert "25% communicating" in console.file.getvalue()


def test_a_sample_cannot_command_the_terminal() -> None:
    assert printable(b"\x1b[31mred\x07\r\n[bold]caf\xc3\xa9\xff").plain == "·[31mred··\n[bold]café\ufffd"


@pytest.mark.parametrize("backends", [("unisono",), ("unisono", "gloo")])
def test_the_plot_is_a_png_whatever_its_name(tmp_path: Path, backends: tuple[str, ...]) -> None:
    path = tmp_path / "curve.anything"
    save_plot(path, [_outcome(backend, 0.1) for backend in backends])
    picture = path.read_bytes()
    assert picture.startswith(b"\x89PNG\r\n")
    assert int.from_bytes(picture[16:20]) == 840 * len(backends)


def test_a_plot_that_cannot_be_written_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"^cannot write /dev/full: No space left on device$"):
        save_plot(Path("/dev/full"), [_outcome("unisono", 0.1)])

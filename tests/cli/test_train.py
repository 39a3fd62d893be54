import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import agents
from unisono import cli
from unisono.cli.main import app

COMMAND = [sys.executable, "-m", "unisono.cli", "train"]
TINY = ["--ranks", "2", "--width", "16", "--layers", "1", "--context", "16", "--batch", "16"]
BOX = ("│", "┃")
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there are GPUs")


def _environment(folder: Path) -> dict[str, str]:
    temporary = folder / "temporary"
    temporary.mkdir()
    return os.environ | {"TMPDIR": str(temporary), "COLUMNS": "120"}


def _train(*arguments: str) -> Result:
    """The command in this process, whose ranks are forked from the server that all tests share."""
    return CliRunner().invoke(app, ["train", *TINY, *arguments], env={"COLUMNS": "120"})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "0"], "--ranks is 0, expected 1 or more"),
        (["--ranks", "four"], "Invalid value for '--ranks'"),
        (["--steps", "-1"], "--steps is -1, expected 1 or more"),
        (["--backend", "pigeon"], "unknown backend 'pigeon': expected one of unisono, gloo"),
        (["--compare", "pigeon"], "unknown backend 'pigeon': expected one of unisono, gloo"),
        (["--backend", "gloo", "--compare", "gloo"], "already in use"),
        (["--backend", "nccl"], "unknown backend 'nccl': expected one of unisono, gloo"),
        (["--device", "cuda", "--compare", "gloo"], "unknown backend 'gloo': expected one of unisono, nccl"),
        (["--device", "tpu"], "unknown --device 'tpu': expected one of cpu, cuda"),
        pytest.param(["--device", "cuda"], "--device cuda needs a GPU, but torch ", marks=WITHOUT_GPU),
        (["--text", "missing.txt"], "cannot read the text missing.txt: No such file"),
        (["--text", "/"], "cannot read the text /: it is no regular file"),
        (["--text", "/dev/null"], "cannot read the text /dev/null: it is no regular file"),
        (["--plot", "/"], "cannot write the plot /: it is a directory"),
        (["--plot", "missing/curve.png"], "the directory missing does not exist"),
        (["--ranks", "4", "--tp", "3"], "a mesh of dp · tp · pp · sp = 1 · 3 · 1 · 1 has 3 ranks, not 4"),
        (["--ranks", "8", "--dp", "2", "--tp", "2"], "has 4 ranks, not 8"),
        (["--tp", "0", "--ranks", "4"], "tp = 0, expected 1 or more"),
        (["--dp", "0"], "the mesh has dp = 0, expected 1 or more"),
        (["--tp", "3"], "4 attention heads do not divide by tp = 3"),
        (["--pp", "4"], "4 stages for 3 layers"),
        (["--pp", "2", "--schedule", "zb-v"], "4 stages for 3 layers"),
        (["--pp", "2", "--schedule", "zigzag"], "unknown pipeline schedule 'zigzag': expected one of gpipe, 1f1b"),
        (["--sp", "64"], "a context of 96 positions makes no 128 pieces"),
        (["--dp", "4", "--pp", "2", "--batch", "15"], "does not fill 4 microbatches on each of dp = 4 ranks"),
        (["--microbatches", "4"], "--microbatches is for training on a mesh"),
        (["--schedule", "gpipe"], "--schedule is for training on a mesh"),
        (["--sideways"], "No such option: --sideways"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["train", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("unisono: ")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_no_room_for_a_socket_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    deep = tmp_path / ("a" * 100)
    deep.mkdir()
    environment = os.environ | {"TMPDIR": str(deep)}
    result = subprocess.run([*COMMAND, *TINY], env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "AF_UNIX path too long" in result.stderr
    assert f"{deep}: set TMPDIR to another directory" in result.stderr


def test_a_small_text_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_text("too small")
    result = CliRunner().invoke(app, ["train", "--text", str(tmp_path / "small.txt")])
    assert result.exit_code == 2
    assert result.stderr == "unisono: the text small.txt has 9 bytes, expected 3,880 or more for a context of 96\n"


@pytest.mark.parametrize(
    ("environment", "arguments", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["--ranks", "3"], "leave --ranks out under torchrun"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, [], "expected whole numbers"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, ["--pp", "3"], "1 · 1 · 3 · 1 has 3 ranks, not 4"),
    ],
)
def test_a_place_given_by_torchrun_that_does_not_fit(
    environment: dict[str, str], arguments: list[str], words: str
) -> None:
    result = CliRunner().invoke(app, ["train", *arguments], env=environment)
    assert result.exit_code == 2
    assert words in result.stderr


def test_help_shows_an_example() -> None:
    result = CliRunner().invoke(app, ["train", "--help"])
    assert result.exit_code == 0
    assert "unisono train --ranks 4 --compare gloo" in result.stdout


def test_a_run_shows_table_sample_and_plot_and_leaves_nothing_else(tmp_path: Path) -> None:
    command, environment = [*COMMAND, *TINY, "--steps", "6"], _environment(tmp_path)
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert "held-out loss" in result.stdout
    assert "The " in result.stdout
    assert "loss curve: unisono-train.png" in result.stdout
    assert [line.split()[:2] for line in result.stderr.splitlines()] == [["unisono", "5/6"], ["unisono", "6/6"]]
    assert (tmp_path / "unisono-train.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "temporary").glob("unisono-*")) == []


def test_compare_runs_both_backends_and_prints_one_table(tmp_path: Path) -> None:
    result = _train("--steps", "6", "--compare", "gloo", "--plot", str(tmp_path / "both.png"))
    assert result.exit_code == 0, result.stderr
    assert "unisono 6/6" in result.stderr
    assert "gloo 6/6" in result.stderr
    header = next(line for line in result.stdout.splitlines() if "difference" in line)
    assert header.replace("┃", " ").split() == ["unisono", "gloo", "difference"]
    assert "speed-up of a step, unisono over gloo" in result.stdout
    assert (tmp_path / "both.png").exists()


def test_on_a_mesh_it_tells_who_holds_what_and_who_waits(tmp_path: Path) -> None:
    plot = str(tmp_path / "curve.png")
    result = _train("--steps", "6", "--layers", "2", "--pp", "2", "--compare", "gloo", "--plot", plot)
    assert result.exit_code == 0, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "who holds what on the mesh pp2" in lines
    assert "rank pp layers parameters states activations" in lines
    assert [line[:5] for line in lines if line.startswith(("0 0 0", "1 1 1"))] == ["0 0 0", "1 1 1"]
    for backend in ("unisono", "gloo"):
        assert f"communication of a rank in a step on {backend}, waits included" in lines
    bubbles = [line for line in lines if line.startswith("bubble of 1f1b, 4 microbatches: ")]
    assert len(bubbles) == 2
    assert all(line.endswith("% predicted") for line in bubbles)


def test_under_torchrun_the_processes_join(tmp_path: Path) -> None:
    how = (
        f"--standalone --nproc-per-node 2 --run-path --start-method fork {cli.__path__[0]}/__main__.py"  # saves imports
    )
    command = f"{how} {shlex.join(['train', *TINY])} --steps 6 --compare gloo"
    agent = agents.start(command, tmp_path / "printed", environment=_environment(tmp_path), folder=tmp_path)
    code, printed = agents.end(agent), (tmp_path / "printed").read_text()
    assert code == 0, printed
    assert printed.count("held-out loss") == 1
    assert "2 ranks" in printed
    assert (tmp_path / "unisono-train.png").exists()

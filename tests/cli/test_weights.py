import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from unisono.cli.main import app
from unisono.schedule import Schedule
from unisono.selection import Measured, Push
from unisono.weights import layout, rename
from unisono.weights.rules import rules_to_text


def _plan(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["weights", "plan", *map(str, arguments)])


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """trainer.json (rows over 2), engine.json (columns), other.json (a prefix more), rules.json; nothing is tuned."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with torch.device("meta"):
        whole = layout(torch.nn.Sequential(torch.nn.Linear(64, 151), torch.nn.Linear(151, 8)))
    whole.split(2, {"*": 0}).save(tmp_path / "trainer.json")
    whole.split(2, {"*.weight": 1}).save(tmp_path / "engine.json")
    layout({f"model.{name}": torch.empty(whole[name].shape) for name in whole}).save(tmp_path / "other.json")
    (tmp_path / "rules.json").write_text(rules_to_text([rename("*", "model.*")]))
    return tmp_path


def test_a_plan_is_explained(saved: Path) -> None:
    result = _plan(saved / "trainer.json", saved / "engine.json", saved / "engine.json")
    assert result.exit_code == 0
    assert result.stdout.startswith("4 tensors, 87.4 KiB from 2 ranks to 4 ranks of 2 replicas\n")
    assert "weights redistribution · 6 ranks" in result.stdout


def test_rules_bucket_and_topology(saved: Path) -> None:
    options = ("--rules", saved / "rules.json", "--bucket", "1KiB", "--topology", "ethernet", "--forward", "direct")
    result = _plan(saved / "trainer.json", saved / "other.json", *options)
    assert "of at most 1 KiB" in result.stdout
    assert "predicted on ethernet" in result.stdout


def test_the_time_is_predicted_by_what_was_measured_here(saved: Path) -> None:
    sizes = ((1, 4), (100, 1000), (1, 1 << 20), (1, 1 << 23))
    Measured(pushes=[Push("update", 1, 4, tensors, nbytes, 1.0 + tensors) for tensors, nbytes in sizes]).save()
    found = json.loads(_plan(saved / "trainer.json", saved / "engine.json", "--json").stdout)
    assert found["topology"] == "this host, as measured"
    assert 0 < found["bound"] <= found["seconds"] < 20.0
    assert found["seconds"] > 1.0
    assert "predicted on this host, as measured: " in _plan(saved / "trainer.json", saved / "engine.json").stdout
    named = json.loads(
        _plan(saved / "trainer.json", saved / "engine.json", "--topology", "shared_memory", "--json").stdout
    )
    assert (named["topology"], named["seconds"] < 1e-3) == ("shared_memory", True)


def test_json_and_svg(saved: Path) -> None:
    result = _plan(saved / "trainer.json", saved / "engine.json", "--json", "--svg", saved / "plan.svg")
    text, _, wrote = result.stdout.rstrip().rpartition("\n")
    found = json.loads(text)
    assert wrote == f"wrote {saved / 'plan.svg'}"
    assert (saved / "plan.svg").read_text().startswith("<svg")
    assert found["nbytes"] == sum(found["received"]) == sum(found["sent"])
    assert found["nbytes"] == sum(chunk["nbytes"] * len(chunk["targets"]) for chunk in found["chunks"])
    assert Schedule.from_json(found["schedule"]).world_size == 4
    assert 0 < found["bound"] <= found["seconds"]


def test_differences_are_one_table_and_exit_code_2(saved: Path) -> None:
    result = _plan(saved / "trainer.json", saved / "other.json")
    assert result.exit_code == 2
    assert result.stderr.startswith("unisono: what is sent does not fit the receiver: 8 differences\n")
    assert result.stderr.count("\n") == 9
    assert 'rename("*", "model.*")' in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--bucket", "0"], "--bucket must be at least 1 byte"),
        (["--bucket", "many"], "'many' is not a size"),
        (["--topology", "moon"], "unknown topology"),
        (["--forward", "ring"], "unknown forward 'ring'"),
        (["--rules", "none.json"], "cannot read none.json"),
        (["--svg", "/none/plan.svg"], "the directory /none does not exist"),
    ],
)
def test_what_is_refused_is_one_line(saved: Path, options: list[str], words: str) -> None:
    result = _plan(saved / "trainer.json", saved / "engine.json", *options)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert words in result.stderr


def test_files_that_are_no_layouts(saved: Path) -> None:
    (saved / "bad.json").write_text("{}")
    assert "bad.json: not a layout" in _plan(saved / "bad.json", saved / "engine.json").stderr
    assert "cannot read" in _plan(saved / "trainer.json", saved / "none.json").stderr
    assert _plan(saved / "trainer.json").exit_code == 2


def test_the_group_shows_its_commands() -> None:
    result = CliRunner().invoke(app, ["weights"])
    assert result.exit_code == 0
    assert "plan" in result.stdout
    assert "weights" in CliRunner().invoke(app, []).stdout

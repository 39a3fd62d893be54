from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from unisono.bench.result import Result as Measured
from unisono.cli.main import app
from unisono.selection import Measured as Tuned
from unisono.selection import Push


def _bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "weights", *arguments])


def test_prints_writes_draws_and_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    models = ((1, 4), (9, 4), (1, 1 << 20))
    Tuned(pushes=[Push(way, 1, 2, *model, 2.0) for way in ("update", "mapped") for model in models]).save()
    json, plot = tmp_path / "a.json", tmp_path / "a.png"
    few = ("--tensors", "4x30", "--replicas", "1", "--mapped", "--delta", "50%", "--reshard", "1:1", "--runs", "2")
    result = _bench(*few, "--against", "flat", "--json", str(json), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("# up to 2 ranks, pinned over ")
    assert " ".join(lines[2].split()) == "# case size ms ± predicted × flat bound limit check beyond"
    cases = ["4x30 to 1", "4x30 to 1, mapped", "4x30 to 1, 2 changed", "4x30 to 1, 0 changed", "4x30 1:1"]
    assert [text[:29].strip() for text in lines[3:-2]] == cases
    assert lines[-2:] == [f"# wrote {json}", f"# wrote {plot}"]
    assert ["e+03 +" in text for text in lines[3:-2]] == [True, True, False, False, False]
    assert not any("WRONG" in text or "refused" in text for text in lines)
    saved = Measured.load(json)
    assert saved.complete
    assert saved.contenders == ["weights", "unchecked", "flat"]
    predicted = {row.collective: row.predicted for row in saved.rows if row.contender == "weights"}
    known = ("4x30 to 1", "4x30 to 1, mapped")
    assert predicted == {name: pytest.approx(2.0 if name in known else 0.0, rel=0.01) for name in cases}
    assert plot.read_bytes().startswith(b"\x89PNG")
    compared = CliRunner().invoke(app, ["bench", "compare", str(json), str(json)])
    assert "15 noise" in compared.stdout


def test_bad_input_is_one_line() -> None:
    for arguments, words in (
        (("--tensors", "a"), "--tensors is 'a', expected a list such as 300x28000,3000x100"),
        (("--replicas", "x"), "--replicas is 'x', expected numbers"),
        (("--delta", "some"), "--delta is 'some', expected a share"),
        (("--reshard", "2"), "--reshard is '2', expected a list such as 2:2,4:2"),
        (("--json", "/nowhere/a.json"), "/nowhere"),
    ):
        result = _bench(*arguments)
        assert result.exit_code == 2
        assert words in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_collective_is_measured_by_the_command_of_one_word() -> None:
    assert "COLLECTIVE" in CliRunner().invoke(app, ["bench", "--help"]).output
    assert "--reshard" in _bench("--help").output

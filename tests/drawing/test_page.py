"""docs/schedules.md shows what its commands print and draw today.

After a wanted change, UPDATE_GOLDEN=1 writes the page's outputs and pictures anew; look at the diff before committing.
"""

import os
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unisono.cli.main import app

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "schedules.md"
BLOCK = re.compile(r"```console\n\$ (.*)\n((?:.*\n)*?)```")


def _output(command: str) -> str:
    """What a pipeline of unisono and of `sed s/a/b/` prints."""
    text: str | None = None
    for part in command.split(" | "):
        words = shlex.split(part)
        if words[0] == "sed":
            _, pattern, replacement, _ = words[1].split("/")
            assert text is not None
            assert pattern in text
            text = text.replace(pattern, replacement)
        else:
            assert words[0] == "unisono"
            text = CliRunner().invoke(app, words[1:], input=text, env={"COLUMNS": "80"}).stdout
    return str(text)


def _blocks() -> list[tuple[str, str]]:
    return BLOCK.findall(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("command", "shown"), _blocks(), ids=[command for command, _ in _blocks()])
def test_the_page_shows_what_the_command_prints(
    command: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = bool(os.environ.get("UPDATE_GOLDEN"))
    (tmp_path / "docs" / "img").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    printed = _output(command)
    for drawn in (tmp_path / "docs" / "img").iterdir():
        kept = ROOT / "docs" / "img" / drawn.name
        if update:
            kept.write_text(drawn.read_text(encoding="utf-8"), encoding="utf-8")
        assert kept.read_text(encoding="utf-8") == drawn.read_text(encoding="utf-8")
    if update:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(page.replace(f"$ {command}\n{shown}```", f"$ {command}\n{printed}```"), encoding="utf-8")
        shown = printed
    assert shown == printed


def test_every_picture_of_the_page_is_drawn_by_it() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = set(re.findall(r"\]\((img/[^)]*)\)", page))
    drawn = {word.removeprefix("docs/") for command, _ in _blocks() for word in command.split() if "docs/img" in word}
    assert shown == drawn
    assert len(shown) >= 3


@pytest.mark.parametrize("page", ["docs/schedules.md", "README.md"])
def test_the_python_of_the_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that needs no process group, in order; what a comment says is printed is printed."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    code = [block for block in blocks if "init_process_group" not in block]
    assert code
    for block in code:
        exec(compile(block, page, "exec"), {})
        printed = capsys.readouterr().out
        for promised in re.findall(r"# (\[tensor.*)", block):
            assert promised in printed

"""What commands that write files share."""

import os
from pathlib import Path

import pytest

from unisono.cli import common
from unisono.cli.common import check_writable, echo_words
from unisono.errors import UsageError


def test_a_place_for_a_file_is_tried_first_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    check_writable(path, "the plot")
    assert not path.exists()
    path.write_bytes(b"an older curve")
    check_writable(path, "the plot")
    assert path.read_bytes() == b"an older curve"
    for bad, words in [(tmp_path, "it is a directory"), (tmp_path / "none" / "curve.png", "does not exist")]:
        with pytest.raises(UsageError, match=words):
            check_writable(bad, "the plot")


def test_ranks_may_try_the_same_place_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank, for which the file was not there either, removes it first."""
    plain = Path.unlink

    def second(path: Path, missing_ok: bool = False) -> None:
        plain(path)
        plain(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", second)
    check_writable(tmp_path / "curve.png", "the plot")


@pytest.mark.parametrize("terminal", [False, True])
def test_words_are_broken_where_a_terminal_is_narrower(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "is_terminal", lambda stream: terminal)
    monkeypatch.setattr(common, "get_terminal_size", lambda: os.terminal_size((20, 24)))
    lines = ["# a comment of more than one line", "    ring takes 24.5 µs, 1.2 times as long", "short"]
    echo_words("\n".join(lines))
    broken = [
        "# a comment of more",
        "#   than one line",
        "    ring takes 24.5",
        "      µs, 1.2 times",
        "      as long",
        "short",
    ]
    assert capsys.readouterr().out.splitlines() == (broken if terminal else lines)

"""The measured table: look-up between sizes, and the file it is kept in."""

from math import sqrt
from pathlib import Path

import pytest

from unisono.errors import UsageError
from unisono.selection import Measured, Push, Row, table_path


def table() -> Measured:
    times = {1024: 1e-5, 4096: 4e-5, 65536: 1e-4}
    return Measured(Row("all_reduce", 4, "ring", size, seconds) for size, seconds in times.items())


def test_between_sizes_on_a_straight_line_of_logarithms() -> None:
    assert table().seconds("all_reduce", 4, "ring", 4096) == 4e-5
    assert table().seconds("all_reduce", 4, "ring", 2048) == pytest.approx(2e-5)
    middle = sqrt(4096 * 65536)
    assert table().seconds("all_reduce", 4, "ring", middle) == pytest.approx(sqrt(4e-5 * 1e-4))


def test_beyond_the_sizes() -> None:
    assert table().seconds("all_reduce", 4, "ring", 0) == 1e-5
    assert table().seconds("all_reduce", 4, "ring", 8 * 65536) == pytest.approx(8e-4)
    barrier = Measured([Row("barrier", 2, "bruck", 0, 3e-6)])
    assert barrier.seconds("barrier", 2, "bruck", 0) == 3e-6
    assert barrier.seconds("barrier", 2, "bruck", 100) == 3e-6


def test_knows_what_it_knows() -> None:
    assert table().algorithms("all_reduce", 4) == ["ring"]
    assert table().algorithms("all_reduce", 8) == []
    with pytest.raises(KeyError):
        table().seconds("all_reduce", 4, "tree", 1024)


def test_newer_rows_count() -> None:
    merged = table().merged(Measured([Row("all_reduce", 4, "ring", 1024, 9e-5), Row("reduce", 4, "tree", 8, 1e-6)]))
    assert len(merged) == 4
    assert merged.seconds("all_reduce", 4, "ring", 1024) == 9e-5


def test_pushes_are_kept_beside_the_rows(tmp_path: Path) -> None:
    slow, fast, other = (Push(way, 1, 2, 300, 4800, seconds) for way, seconds in (("a", 2.0), ("a", 1.0), ("b", 3.0)))
    table().merged(Measured(pushes=[slow, other])).merged(Measured(pushes=[fast])).save(tmp_path / "t.json")
    assert Measured.load(tmp_path / "t.json").pushes == [fast, other]
    assert Measured.load(tmp_path / "t.json").rows == table().rows


def test_is_kept_in_the_user_s_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert len(Measured.load()) == 0
    path = table().save()
    assert path == table_path()
    assert path.is_relative_to(tmp_path / "unisono")
    assert Measured.load().rows == table().rows
    assert Measured.load().pushes == []
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(table_path()).startswith("/home/somebody/.cache/unisono/tuned-")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "\x00",
        '{"version": 2, "rows": []}',
        '{"version": 1, "rows": [[1]]}',
        '{"version": 1, "rows": [["all_reduce", 4, "ring", 8, 0]]}',
        '{"version": 1, "rows": [["a", "b", "c", 1, 1]]}',
        '{"version": 1, "rows": [], "pushes": [["update", 1, 2, 3, 4, 0]]}',
        '{"version": 1, "rows": [], "pushes": [["update", 1, 2]]}',
    ],
)
def test_a_spoilt_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(UsageError, match=r"t\.json is no table of `unisono tune` .*: delete it or measure again"):
        Measured.load(tmp_path / "t.json")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot keep the measured table in"):
        table().save(tmp_path / "file" / "t.json")
    with pytest.raises(UsageError, match="cannot read the measured table"):
        Measured.load(tmp_path / "file" / "t.json")

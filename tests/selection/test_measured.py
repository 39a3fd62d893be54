"""The measured table: look-up between sizes, and the file it is kept in."""

from math import sqrt
from pathlib import Path

import pytest

from unisono.errors import UsageError
from unisono.selection import Measured, Row, table_path


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


def test_is_kept_in_the_user_s_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert len(Measured.load()) == 0
    path = table().save()
    assert path == table_path()
    assert path.is_relative_to(tmp_path / "unisono")
    assert Measured.load().rows == table().rows
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


def test_shared_memory_is_what_broadcasts_have_measured() -> None:
    sizes = (64, 1 << 20)
    rows = [Row("broadcast", n, "default", size, n * (1e-6 + size * 1e-10)) for n in (2, 4) for size in sizes]
    where = Measured(
        [*rows, Row("broadcast", 8, "ring", 64, 1.0), Row("all_reduce", 8, "default", 64, 1.0)]
    ).shared_memory(5)
    assert where is not None
    assert (where.world_size, where.intra.switched) == (5, False)
    assert where.intra.alpha == pytest.approx(4e-6, rel=0.01)
    assert where.intra.beta == pytest.approx(4e-10)
    assert Measured(rows[:0]).shared_memory(2) is None
    one = Measured([Row("broadcast", 2, "default", 100, 1e-6)]).shared_memory(2)
    assert one is not None
    assert one.intra.beta == 1e-8

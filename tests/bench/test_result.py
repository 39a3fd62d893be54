from pathlib import Path

import pytest

from unisono.bench.result import Machine, Rates, Result, Row, spread, this_machine
from unisono.errors import UsageError

ROW = Row("all_reduce", "unisono", 1 << 20, 1 << 18, "float32", "sum", "in", 4, 10, (3e-3, 1e-3, 2e-3), 0, 1.5, 5e-4)


def test_nccl_tests_arithmetic() -> None:
    assert ROW.time == 2e-3
    assert ROW.algbw == pytest.approx(524.288e6)
    assert ROW.busbw == pytest.approx(1.5 * 524.288e6)
    assert ROW.share_of_bound == 0.25


def test_spread_is_half_of_the_middle_half() -> None:
    assert spread([1.0]) == 0.0
    assert spread([10.0, 9.0, 11.0, 1.0, 100.0, 10.5, 9.5]) == pytest.approx((11.0 - 9.0) / 2 / 10.0)


def test_rates_lie_on_lines_in_logarithms() -> None:
    rates = Rates((100, 10_000), (4.0, 1.0), (8.0, 2.0))
    assert [rates.copies(n) for n in (1, 100, 1_000, 10_000, 1_000_000)] == [4.0, 4.0, pytest.approx(2.0), 1.0, 1.0]
    assert rates.reduces(1_000) == pytest.approx(4.0)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    refused = Row("gather", "gloo", 8, 1, "float32", "none", "out", 4, refused="no")
    result = Result({"pin": True}, this_machine(), Rates((1,), (2.0,), (3.0,)), [ROW, refused], True, "unisono bench")
    result.save(tmp_path / "a.json")
    assert Result.load(tmp_path / "a.json") == result
    assert result.contenders == ["unisono", "gloo"]
    assert result.of("gather", "gloo") == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "unisono bench", "version": 2}', "\x00"])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UsageError, match="is no result of `unisono bench --json`"):
        Result.load(tmp_path / "a.json")
    with pytest.raises(UsageError, match="cannot read"):
        Result.load(tmp_path)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        Result({}, Machine()).save(tmp_path / "none" / "a.json")

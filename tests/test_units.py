"""Sizes in, sizes and times out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import UsageError
from unisono.units import name_ranks, parse_nbytes, show_nbytes, show_ranks, show_seconds, show_spans


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4", 4),
        ("0", 0),
        ("4B", 4),
        ("1KiB", 1024),
        ("1k", 1024),
        ("1M", 1 << 20),
        ("1MiB", 1 << 20),
        ("256MB", 256_000_000),
        ("1.5 GiB", 3 << 29),
        (" 2T ", 2 << 40),
        ("1kb", 1000),
    ],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "KiB", "-1", "1 2", "1iB", "1Ki", "1e3", "nan", "1PB", "0x10"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_nbytes(text)


def test_half_a_byte_is_refused() -> None:
    with pytest.raises(UsageError, match="not a whole number of bytes"):
        parse_nbytes("0.5")


@given(st.sampled_from([4, 1023, 1024, 1536, 1 << 20, 3 << 29, 5 << 40]))
def test_a_shown_size_reads_back(nbytes: int) -> None:
    assert parse_nbytes(show_nbytes(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (2.5e-9, "2.5 ns"),
        (1e-6, "1 µs"),
        (9.9996e-4, "1 ms"),
        (1.234e-5, "12.3 µs"),
        (0.1327, "133 ms"),
        (61.0, "61 s"),
    ],
)
def test_times_are_shown_with_three_digits(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


def test_one_rank_and_many() -> None:
    assert [show_ranks(count) for count in (1, 2)] == ["1 rank", "2 ranks"]


def test_ranks_are_named() -> None:
    assert [name_ranks([3]), name_ranks([0, 2])] == ["rank 3", "ranks 0, 2"]


def test_numbers_that_follow_each_other_are_ranges() -> None:
    assert [show_spans(numbers) for numbers in ([], [4], [0, 1, 2, 5, 7, 8])] == ["", "4", "0-2, 5, 7, 8"]
    assert show_spans([0, 1, 2, 6, 8, 9], ",", least=2) == "0-2,6,8-9"

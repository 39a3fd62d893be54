import pytest

from unisono.algorithms.formula import Formula, ceil_log2, squarish
from unisono.errors import UsageError


def test_values() -> None:
    assert Formula("2*(n-1)/n")(8) == 1.75
    assert Formula("n-2+k")(5, 7) == 10
    assert [Formula("L")(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]
    assert [(Formula("p")(n), Formula("x")(n)) for n in (2, 3, 7, 8)] == [(2, 0), (2, 1), (4, 3), (8, 0)]
    assert (Formula("a")(12), Formula("b")(12)) == (4, 3)
    assert Formula("max(n, 9) + min(k, 1)")(4, 5) == 10


def test_one_rank_does_nothing() -> None:
    assert Formula("7")(1) == 0


def test_bounds_are_marked() -> None:
    assert Formula("<= 2*L").is_bound
    assert Formula("<= 2*L")(8) == 6
    assert not Formula("2*L").is_bound
    assert str(Formula("<= 2*L")) == "<= 2*L"


@pytest.mark.parametrize(("text", "says"), [("2*", "cannot be read"), ("2*m", "unknown name m"), ("open(n)", "open")])
def test_other_words_are_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Formula(text)


def test_helpers() -> None:
    assert [ceil_log2(n) for n in (1, 2, 3, 1024, 1025)] == [0, 1, 2, 10, 11]
    assert [squarish(n) for n in (1, 7, 12, 24576)] == [(1, 1), (1, 7), (3, 4), (128, 192)]

"""What the others read of a process that has ended by an exception."""

from unisono.backend.exit_hooks import _quote


def _raised(text: str) -> ValueError:
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


def test_an_exception_is_quoted_on_one_line_with_its_own() -> None:
    words = _quote(_raised("bad\n  sample\n" + 9000 * "y"))
    assert words.startswith("ended by ValueError: bad sample yyy")
    assert "…, at " in words
    assert words.endswith(" in _raised")
    assert len(words) < 1200
    assert _quote(ValueError()) == "ended by ValueError"


def test_a_line_of_the_standard_library_is_nobodys() -> None:
    import json

    try:
        json.loads("{")
    except ValueError as error:
        words = _quote(error)
    assert words.endswith(" in test_a_line_of_the_standard_library_is_nobodys")

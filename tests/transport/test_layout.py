import pytest

from unisono.transport import layout
from unisono.transport.layout import Layout


@pytest.mark.parametrize("name", ["PID", "STATE", "ISSUED_AT", "JOINED", "FAREWELL", "WRITING"])
def test_the_mark_covers_the_numbers_of_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Layout(2).mark
    monkeypatch.setattr(layout, name, getattr(layout, name) + 1)
    assert Layout(2).mark != before


def test_the_mark_covers_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Layout(2).mark
    monkeypatch.setattr(Layout, "TEXT", 2 * Layout.TEXT)
    assert Layout(2).mark != before

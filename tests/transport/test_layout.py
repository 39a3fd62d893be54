import pytest

from unisono.transport import layout
from unisono.transport.layout import Layout


@pytest.mark.parametrize("name", ["PID", "STATE", "ISSUED_AT", "JOINED", "EXIT_NOTE", "WRITING"])
def test_the_mark_covers_the_numbers_of_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Layout(2).mark
    monkeypatch.setattr(layout, name, getattr(layout, name) + 1)
    assert Layout(2).mark != before


def test_the_mark_covers_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Layout(2).mark
    monkeypatch.setattr(Layout, "TEXT", 2 * Layout.TEXT)
    assert Layout(2).mark != before


def test_parts_of_the_layout_do_not_overlap() -> None:
    for world_size in (1, 2, 3, 8, 64, 500):
        made = Layout(world_size)
        places = [
            made.records, made.texts, made.outboxes, made.counters, made.bells, made.headers, made.handles,
            made.ring_controls, made.rings, made.stages, made.total,
        ]  # fmt: skip
        assert places == sorted(places)
        assert made.stage % 64 == 0
        assert made.ring % 64 == 0
        assert made.texts - made.records >= made.RECORD * world_size
        assert made.stages - made.rings == made.ring * world_size**2

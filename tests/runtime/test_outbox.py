"""Outboxes of a host's ranks: the last to publish sees all, and reads what each has for each host."""

import os

import pytest

from unisono.runtime.outbox import LATER, NOTHING, Described, Outboxes, packed
from unisono.transport.layout import Layout
from unisono.transport.segment import Segment


@pytest.fixture
def segment() -> Segment:
    layout = Layout(4)
    fd = os.memfd_create("unisono-test")
    os.ftruncate(fd, layout.total)
    made = Segment(fd, layout)
    os.close(fd)
    return made


def test_the_last_to_publish_reads_all(segment: Segment) -> None:
    first, last = (Outboxes(segment, rank, (1, 3), 3) for rank in (1, 3))
    first.publish(7, packed(False, [[(64, 8), (128, 4)], NOTHING, []]))
    assert not first.complete(7)
    last.publish(7, packed(True, [LATER, NOTHING, [(256, 16)]]))
    assert last.complete(7)
    assert last.read() == (
        True,
        {
            1: [Described.of([(64, 8), (128, 4)]), NOTHING, Described.of([])],
            3: [LATER, NOTHING, Described.of([(256, 16)])],
        },
    )
    assert not last.complete(8)


def test_the_most_spans_have_room(segment: Segment) -> None:
    mine, next_one = (Outboxes(segment, rank, (0, 1), 2) for rank in (0, 1))
    next_one.publish(0, packed(False, [[(1, 1)], NOTHING]))
    spans = [(1 << 40 | k, 1 << 50 | k) for k in range(mine.most_spans)]
    mine.publish(0, packed(False, [spans, spans]))
    assert mine.complete(0)
    assert mine.read() == (False, {0: 2 * [Described.of(spans)], 1: [Described.of([(1, 1)]), NOTHING]})
    assert mine.most_spans >= 2 * segment.layout.world_size

import pytest

from unisono.drawing.messages import Message, messages, spans, title
from unisono.schedule import Collective, Schedule, Step, Transfer


def _schedule(*transfers: Transfer, switches: int = 0) -> Schedule:
    return Schedule("mine", Collective("all_reduce", 3, 16), (Step.of(*transfers),), switches)


@pytest.mark.parametrize(
    ("numbers", "words"), [([4], "4"), ([0, 1], "0-1"), ([0, 2, 3, 4, 9], "0,2-4,9"), (list(range(8)), "0-7")]
)
def test_spans(numbers: list[int], words: str) -> None:
    assert spans(numbers) == words


def test_chunks_between_two_ranks_are_one_message() -> None:
    schedule = _schedule(
        Transfer(0, 1, 5), Transfer(1, 0, 0, reduce=True), Transfer(0, 1, 2, 2), Transfer(0, 1, 7, reduce=True)
    )
    found, bad = messages(schedule, schedule.steps[0])
    assert found == [Message(0, 1, (2, 3, 5), False), Message(1, 0, (0,), True), Message(0, 1, (7,), True)]
    assert bad == 0


def test_transfers_that_cannot_be_drawn_are_counted() -> None:
    schedule = _schedule(
        Transfer(0, 3, 0), Transfer(-1, 0, 0), Transfer(1, 1, 0), Transfer(0, 1, 16), Transfer(0, 1, 14, 3),
        Transfer(0, 1, 0, 0), Transfer(0, 1, -1), Transfer(0, 2, 0),
    )  # fmt: skip
    assert messages(schedule, schedule.steps[0]) == ([Message(0, 2, (0,), False)], 7)


def test_a_switch_can_be_drawn() -> None:
    schedule = _schedule(Transfer(0, 3, 0), switches=1)
    assert messages(schedule, schedule.steps[0]) == ([Message(0, 3, (0,), False)], 0)


def test_a_long_list_of_chunks_becomes_a_number() -> None:
    assert Message(0, 1, (0, 2, 4), True).label == "c0,2,4"
    assert Message(0, 1, (0, 2, 4, 6, 8), True).label == "c×5"
    assert str(Message(0, 1, (0, 2, 4, 6, 8), True)) == "0→1 c0,2,4,6,8 reduced into"


def test_title_counts() -> None:
    steps = (Step.of(Transfer(0, 1, 0)),) * 1200
    rooted = Schedule("mine", Collective("broadcast", 2, 1, root=1), steps, switches=2)
    assert title(rooted) == "mine broadcast · 2 ranks · 2 switches · 1 chunk · 1,200 steps · root 1"
    assert title(Schedule("one", Collective("all_reduce", 1, 1), ())) == "one all_reduce · 1 rank · 1 chunk · 0 steps"

import re

import pytest

from unisono.algorithms.pipelines import build_pipeline
from unisono.errors import ScheduleError, UsageError
from unisono.schedule import PipelineSchedule
from unisono.verification import verify

TEXT = str(build_pipeline("1f1b", 2, 2))


def faults(text: str) -> list[str]:
    """The messages, without the places."""
    report = verify(PipelineSchedule.from_text(text))
    return [re.sub(r"^rank \d+(, action \d+)?: ", "", finding.message) for finding in report.findings]


def test_a_right_schedule_is_true_and_says_so() -> None:
    report = verify(PipelineSchedule.from_text(TEXT))
    assert report
    assert str(report) == "1f1b pipeline, 2 stages on 2 ranks, 2 microbatches: correct"
    report.raise_if_bad()


def test_a_wrong_one_is_false_and_what_is_for_collectives_is_refused() -> None:
    assert not verify(PipelineSchedule.from_text(TEXT.replace("0BW1", "0B1")))
    with pytest.raises(UsageError, match="in_flight and in_place are for collectives"):
        verify(PipelineSchedule.from_text(TEXT), in_flight=1)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("0BW1", "", ["no rank does 0B1", "no rank does 0W1"]),
        ("0BW1", "0B1", ["no rank does 0W1"]),
        ("0BW1", "0BW1 0F1", ["0F1 is done twice, first as action 1"]),
        ("0BW1", "0B1 0W1 0W1", ["0W1 is done twice, first as action 4"]),
        ("0BW1", "0W1 0B1", ["0W1 comes before 0B1, which it needs"]),
        ("1F1 1BW1", "1BW1 1F1", ["1B1 comes before 1F1, which it needs"]),
        ("1BW1", "1BW1 2F0", ["2F0: there are only stages 0 to 1"]),
        ("1BW1", "1BW1 1F2", ["1F2: there are only microbatches 0 to 1"]),
        ("1BW1", "1BW1 0F1", ["stage 0 is on rank 1 and on rank 0", "0F1 is done twice, first as action 1 on rank 0"]),
        ("stages=2", "stages=0", ["a pipeline needs at least one stage, one microbatch and one rank"]),
    ],
)
def test_each_fault_is_found(old: str, new: str, found: list[str]) -> None:
    assert faults(TEXT.replace(old, new)) == found


def test_a_cycle_of_ranks_is_told_with_who_waits_for_whom() -> None:
    text = TEXT.replace("0F0 0F1 0BW0", "0F0 0BW0 0F1").replace("1F0 1BW0 1F1", "1F0 1F1 1BW0")
    told = "rank 0 at 0BW0 waits for 1B0 of rank 1, rank 1 at 1F1 waits for 0F1 of rank 0"
    assert faults(text) == [f"ranks wait for each other for ever: {told}"]


def test_a_rank_beside_a_cycle_is_not_blamed() -> None:
    text = str(build_pipeline("gpipe", 3, 2)).replace("1F0 1F1 1BW0", "1F0 1BW0 1F1")
    findings = verify(PipelineSchedule.from_text(text)).findings
    assert [finding.rank for finding in findings] == [1]
    assert "rank 0 at" not in findings[0].message


def test_all_findings_come_at_once_with_an_arrow_at_the_place() -> None:
    row = "0F0 0F1 0F2 0F3 0F4 0F5 0BW0 0BW1 0BW2 0BW3 0BW4 0BW4 0BW5"
    with pytest.raises(ScheduleError) as caught:
        verify(PipelineSchedule.from_text(f"pipeline mine stages=1 microbatches=7\nrank 0: {row}")).raise_if_bad()
    assert str(caught.value).split("\n\n") == [
        "mine pipeline, 1 stage on 1 rank, 7 microbatches: 5 findings",
        "lost: rank 0: no rank does 0F6",
        "lost: rank 0: no rank does 0B6",
        "twice: rank 0, action 11: 0B4 is done twice, first as action 10\n"
        "    … 0BW1 0BW2 0BW3 0BW4 0BW4 0BW5\n"
        "                          ^^^^",
        "lost: rank 0: no rank does 0W6",
        "twice: rank 0, action 11: 0W4 is done twice, first as action 10\n"
        "    … 0BW1 0BW2 0BW3 0BW4 0BW4 0BW5\n"
        "                          ^^^^",
    ]


def test_many_that_are_missing_are_counted() -> None:
    assert faults("pipeline mine stages=1 microbatches=9\nrank 0:")[0] == "no rank does 0F0, 0F1, 0F2 and 6 more"

"""verify finds every way to spoil a schedule and says where; it calls nothing lost that numbers find right."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from algorithms.oracle import numbers_are_right
from unisono.algorithms import build, list_algorithms
from unisono.errors import ScheduleError, UsageError
from unisono.schedule import Schedule, Step, Transfer
from unisono.verification import KINDS, Report, verify

Mutation = Callable[[list[list[Transfer]], st.DataObject], None]


def _changed(schedule: Schedule, change: Callable[[list[list[Transfer]]], None]) -> Schedule:
    steps = [list(step) for step in schedule.explicit_steps()]
    change(steps)
    return replace(schedule, steps=tuple(Step.of(*step) for step in steps))


def _kinds(report: Report) -> list[str]:
    return [finding.kind for finding in report.findings]


# What each kind of finding looks like.


def test_a_correct_schedule_says_what_it_needs() -> None:
    report = verify(build("ring", "all_reduce", 4))
    assert report.ok
    assert str(report) == "ring all_reduce over 4 ranks, 6 steps: correct (needs 1 message in flight per rank)"
    report.raise_if_bad()
    shifted = verify(build("shift", "all_to_all", 4))
    assert str(shifted).endswith("correct (needs 1 message in flight per rank, not in place)")


def test_a_dropped_transfer_loses_a_contribution() -> None:
    report = verify(_changed(build("tree", "reduce", 4), lambda steps: steps[0].pop(1)))
    assert str(report) == (
        "tree reduce over 4 ranks, 2 steps: 1 finding\n"
        "\n"
        "lost: chunk 0: the contribution of rank 3 is missing at rank 0 at the end\n"
        "    chunk 0        rank 0  rank 1  rank 2  rank 3\n"
        "    before         0       1       2       3\n"
        "    step 0  1>0 +  0-1     1       2       3\n"
        "    step 1  2>0 +  0-2     1       2       3\n"
        "    after          0-2     1       2       3\n"
        "                   ^ without 3"
    )


def test_an_overwritten_contribution_is_shown_where_it_vanishes() -> None:
    report = verify(_changed(build("tree", "reduce", 2), lambda steps: steps.__setitem__(0, [Transfer(1, 0, 0)])))
    (finding,) = report.findings
    assert (finding.kind, finding.step, finding.steps) == ("lost", 0, (0,))
    assert finding.message.endswith("rank 0 is missing at rank 0 at the end; step 0 overwrites it at rank 0")
    assert finding.picture.splitlines()[-1].strip() == "^ 0 is overwritten"


def test_a_doubled_contribution_is_shown_where_it_first_doubles() -> None:
    report = verify(_changed(build("ring", "all_reduce", 3), lambda steps: steps[0].append(steps[0][0])))
    (finding,) = report.findings
    assert (finding.kind, finding.step, finding.steps) == ("twice", 0, (0,))
    assert finding.picture.splitlines() == [
        "chunk 2               rank 0  rank 1  rank 2",
        "before                0       1       2",
        "step 0  0>1 +, 0>1 +  0       2×0+1   2",
        "                              ^ 0 twice",
    ]


def test_a_copy_may_not_meet_another_write_or_read() -> None:
    twice = verify(_changed(build("tree", "broadcast", 3), lambda steps: steps[0].append(steps[0][0])))
    assert _kinds(twice) == ["race"]
    assert "step 0: chunk 0 at rank 2 is written twice: 0>2 c0 =, 0>2 c0 =" in str(twice)
    # swapping blocks 0 and 1 while both are read
    swap = "schedule swap all_gather ranks=2 chunks=2\nstep 0: 0>1 c0 =, 1>0 c1 =\nstep 1: 0>1 c0 =, 1>0 c0 ="
    clash = verify(Schedule.from_text(swap))
    assert _kinds(clash) == ["race", "race"]
    assert "step 1: chunk 0 at rank 0 is read while overwritten: 0>1 c0 =, 1>0 c0 =" in str(clash)


def test_reductions_may_meet_and_cross() -> None:
    assert verify(build("one_shot", "all_reduce", 5)).ok
    assert verify(build("recursive_doubling", "all_reduce", 4)).ok


def test_nothing_can_be_sent_or_reduced_into_where_nothing_is() -> None:
    sent = verify(
        Schedule.from_text("schedule x broadcast ranks=2 chunks=1 root=0\nstep 0: 1>0 c0 +\nstep 1: 0>1 c0 =")
    )
    assert _kinds(sent) == ["empty"]
    assert "step 0: rank 1 sends chunk 0 but holds nothing of it" in str(sent)
    onto = verify(Schedule.from_text("schedule x broadcast ranks=2 chunks=1 root=0\nstep 0: 0>1 c0 +"))
    assert _kinds(onto) == ["empty"]
    assert "step 0: chunk 0 is reduced into rank 1, which holds nothing of it" in str(onto)
    assert verify(build("in_network", "all_reduce", 3)).ok


def test_ranks_and_chunks_must_exist() -> None:
    text = "schedule x all_reduce ranks=2 chunks=2\nstep 0: 0>2 c0 +, 0>1 c1-2 +, 1>1 c0 =, -1>0 c0 +, 0>1 c3-1 +"
    report = verify(Schedule.from_text(text))
    assert [f.message.split(": ", 2)[-1] for f in report.findings if f.kind == "range"] == [
        "there is no rank 2",
        "chunks run from 0 to 1",
        "a rank needs no message to itself",
        "there is no rank -1",
        "it moves no chunk",
    ]
    assert report.findings[0].picture == "step 0: 0>2 c0 +\n        ^ there is no rank 2"
    assert _kinds(report).count("lost") == 1


def test_a_bounded_number_of_messages_may_deadlock() -> None:
    ring = build("ring", "all_reduce", 3)
    assert verify(ring, in_flight=1).ok
    report = verify(ring, in_flight=0)
    assert _kinds(report) == ["deadlock"]
    assert str(report).splitlines()[2:] == [
        "deadlock: with 0 messages in flight per rank, ranks wait for each other for ever: 0 -> 1 -> 2 -> 0",
        "    rank 0 in step 0, sending to 1, waits for rank 1",
        "    rank 1 in step 0, sending to 2, waits for rank 2",
        "    rank 2 in step 0, sending to 0, waits for rank 0",
        "                                              ^ and so round again",
    ]
    direct = build("direct", "all_to_all", 5)
    assert verify(direct).in_flight == 4
    assert verify(direct, in_flight=4).ok
    assert not verify(direct, in_flight=3).ok


def test_one_buffer_for_input_and_output() -> None:
    shift = build("shift", "all_to_all", 3)
    assert verify(shift).ok
    report = verify(shift, in_place=True)
    assert set(_kinds(report)) == {"in_place"}
    assert report.findings[0].message == "step 0: chunk 6 arrives at rank 0 over chunk 2, which leaves in step 1"
    assert report.findings[0].steps == (0, 1)


def test_waste_is_noted_and_no_defect() -> None:
    report = verify(build("star", "all_gather", 3))
    assert report.ok
    assert [note.kind for note in report.notes] == ["redundant", "redundant"]
    assert "2 notes: transfers that could be left out in part" in str(report)
    late = verify(_changed(build("ring", "reduce_scatter", 3), lambda steps: steps.append(steps[0][:1])))
    assert [(note.kind, note.message) for note in late.notes] == [
        ("unused", "step 2: chunk 2 is sent to rank 1, but nothing comes of it")
    ]


def test_all_findings_are_reported_at_once_in_the_order_of_steps() -> None:
    def spoil(steps: list[list[Transfer]]) -> None:
        steps[0][0] = replace(steps[0][0], dst=7)
        steps[3].append(steps[3][0])

    report = verify(_changed(build("ring", "all_reduce", 3), spoil), in_flight=0)
    assert {"range", "race", "lost", "deadlock"} <= set(_kinds(report))
    assert [f.step for f in report.findings] == sorted(f.step for f in report.findings)
    with pytest.raises(ScheduleError) as error:
        report.raise_if_bad()
    for finding in report.findings:
        assert finding.message in str(error.value)
        assert finding.kind in KINDS


def test_alike_findings_are_one() -> None:
    report = verify(_changed(build("tree", "broadcast", 8, chunks=16), lambda steps: steps[0].clear()))
    lost = [f.message for f in report.findings if f.kind == "lost"]
    assert lost == ["chunks 0-15: the contribution of rank 0 is missing at ranks 4-7 at the end"]


def test_what_is_too_large_or_senseless_is_refused() -> None:
    with pytest.raises(UsageError, match=r"over 24576 ranks with 24576 chunks is too large to prove .* at fewer ranks"):
        verify(build("ring", "all_reduce", 24576))
    with pytest.raises(UsageError, match="in_flight must be at least 0, got -1"):
        verify(build("ring", "all_reduce", 2), in_flight=-1)


# Mutations: one change at random in any algorithm, judged beside an independent run on numbers.

VICTIMS = [e for e in list_algorithms() if e.collective != "barrier"]


def _drop(steps: list[list[Transfer]], data: st.DataObject) -> None:
    step = data.draw(st.sampled_from([s for s in steps if s]))
    step.pop(data.draw(st.integers(0, len(step) - 1)))


def _duplicate(steps: list[list[Transfer]], data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(steps) - 1))
    again = data.draw(st.sampled_from(steps[i]))
    at = data.draw(st.integers(i, len(steps)))
    steps.insert(at, [again]) if at > i else steps[i].append(again)


def _reorder(steps: list[list[Transfer]], data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(steps) - 1))
    moved = steps[i].pop(data.draw(st.integers(0, len(steps[i]) - 1)))
    steps[data.draw(st.integers(0, len(steps) - 1).filter(lambda j: j != i))].append(moved)


def _swap_steps(steps: list[list[Transfer]], data: st.DataObject) -> None:
    i, j = data.draw(st.lists(st.integers(0, len(steps) - 1), min_size=2, max_size=2, unique=True))
    steps[i], steps[j] = steps[j], steps[i]


def _redirect(steps: list[list[Transfer]], data: st.DataObject) -> None:
    step = data.draw(st.sampled_from([s for s in steps if s]))
    k = data.draw(st.integers(0, len(step) - 1))
    end = data.draw(st.sampled_from(["src", "dst"]))
    ranks = {t.src for s in steps for t in s} | {t.dst for s in steps for t in s} | {99}
    other = data.draw(st.sampled_from(sorted(ranks - {step[k].src, step[k].dst})))
    step[k] = replace(step[k], **{end: other})


def _recolour(steps: list[list[Transfer]], data: st.DataObject) -> None:
    step = data.draw(st.sampled_from([s for s in steps if s]))
    k = data.draw(st.integers(0, len(step) - 1))
    if data.draw(st.booleans()):
        step[k] = replace(step[k], reduce=not step[k].reduce)
    else:
        step[k] = replace(step[k], chunk=step[k].chunk + data.draw(st.sampled_from([-1, 1])))


def _victim(data: st.DataObject, least_steps: int = 1) -> Schedule:
    algorithm = data.draw(st.sampled_from(VICTIMS))
    n = data.draw(st.integers(2, 7), "ranks")
    root = data.draw(st.integers(0, n - 1), "root") if algorithm.rooted else 0
    schedule = build(algorithm.name, algorithm.collective, n, root, data.draw(st.integers(1, 2), "chunks"))
    assume(schedule.num_steps >= least_steps)
    return schedule


@settings(max_examples=250)
@given(st.data())
def test_every_dropped_transfer_is_caught(data: st.DataObject) -> None:
    schedule = _victim(data)
    mutant = _changed(schedule, lambda steps: _drop(steps, data))
    report = verify(mutant)
    if verify(schedule).notes and numbers_are_right(mutant):
        return  # what was dropped is among the transfers noted as redundant
    assert not report.ok
    assert not numbers_are_right(mutant)


@settings(max_examples=250)
@given(st.data())
def test_every_duplicated_transfer_is_caught(data: st.DataObject) -> None:
    schedule = _victim(data)
    report = verify(_changed(schedule, lambda steps: _duplicate(steps, data)))
    assert not report.ok or len(report.notes) > len(verify(schedule).notes)


@settings(max_examples=400)
@given(st.data(), st.sampled_from([_reorder, _swap_steps, _redirect, _recolour]))
def test_any_other_mutation_is_caught_if_and_only_if_it_spoils_the_result(
    data: st.DataObject, mutation: Mutation
) -> None:
    mutant = _changed(_victim(data, least_steps=2), lambda steps: mutation(steps, data))
    report = verify(mutant)
    spoiled = not numbers_are_right(mutant)
    kinds = set(_kinds(report))
    if not kinds & {"race", "empty"}:  # which leave the outcome undefined
        assert bool(kinds & {"lost", "twice"}) == spoiled
    if spoiled:
        assert not report.ok
        assert all(f.message and f.picture for f in report.findings)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_every_dropped_token_of_a_dissemination_barrier_is_caught(n: int) -> None:
    schedule = build("bruck", "barrier", n)
    for i, step in enumerate(schedule.steps):
        for k in range(len(step)):

            def drop(steps: list[list[Transfer]], i: int = i, k: int = k) -> None:
                steps[i].pop(k)

            assert _kinds(verify(_changed(schedule, drop))) == ["lost"]


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("ring", r"^verify takes a schedule, got 'ring': build it first, e\.g\. build\("),
        (None, "^verify takes a schedule, got None: build it first"),
        ([], r"^verify takes a schedule, got \[\]: build it first"),
        ([build("ring", "all_reduce", 2)], "^verify takes one schedule at a time"),
    ],
)
def test_what_is_no_schedule_is_refused(subject: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        verify(subject)

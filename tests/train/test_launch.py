import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from train.small import small
from unisono.errors import PeerLostError, UnisonoError
from unisono.launch import termination_as_exit
from unisono.train.launch import launch
from unisono.train.settings import StepRecord

_others: list[object] = []


@pytest.fixture(autouse=True)
def _nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test no rank runs any more and the folder of temporary files is empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    _others[:] = multiprocessing.active_children()  # the reusable ranks of other tests
    yield
    assert [child for child in multiprocessing.active_children() if child not in _others] == []
    assert list(folder.glob("unisono-*")) == []


def _on_first_records(act: Callable[[], None]) -> Callable[[list[StepRecord]], None]:
    """A listener that acts once, while the ranks are in the middle of their steps."""
    calls: list[int] = []

    def listen(records: list[StepRecord]) -> None:
        calls.append(1)
        if len(calls) == 1:
            act()

    return listen


def _kill_a_rank(number: int) -> Callable[[], None]:
    def kill() -> None:
        victim = next(child for child in multiprocessing.active_children() if child not in _others).pid
        assert victim is not None
        os.kill(victim, number)

    return kill


def test_every_record_arrives_in_order(tmp_path: Path) -> None:
    seen: list[StepRecord] = []
    outcome = launch(small(tmp_path), seen.extend)
    assert seen == outcome.records
    assert [record.step for record in seen] == list(range(1, 8))


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_rank_ends_all_and_is_named(tmp_path: Path, backend: str, number: signal.Signals) -> None:
    settings = small(tmp_path, backend=backend, ranks=3, steps=100_000)
    with pytest.raises(PeerLostError, match=rf"^rank \d failed: process \d+ was ended by {number.name}$"):
        launch(settings, _on_first_records(_kill_a_rank(number)))


def test_an_error_on_a_rank_is_told_in_one_line(tmp_path: Path) -> None:
    settings = replace(small(tmp_path), text=tmp_path / "missing.txt")
    with pytest.raises(UnisonoError, match=r"^rank \d failed: UsageError: cannot read the text .*missing.txt: No such"):
        launch(settings, lambda records: None)


def test_an_error_that_is_not_ours_says_where(tmp_path: Path) -> None:
    settings = small(tmp_path, seed="not a number")
    with pytest.raises(UnisonoError, match=r"^rank \d failed: TypeError: .*\(settings.py:\d+\)$"):
        launch(settings, lambda records: None)


def test_an_error_of_the_listener_ends_the_ranks(tmp_path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch(small(tmp_path, steps=100_000), _on_first_records(fail))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_end_by_signal_leaves_through_the_clean_up_and_gives_its_handler_back(
    tmp_path: Path, number: signal.Signals
) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # nohup has SIGHUP ignored
    try:
        with pytest.raises(SystemExit) as caught:
            launch(small(tmp_path, steps=100_000), _on_first_records(lambda: signal.raise_signal(number)))
        assert caught.value.code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with termination_as_exit():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)

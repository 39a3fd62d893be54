"""What is passed on when ranks give up one after another: always who was lost first, however long the texts.

How long a rank that ends over a lost one stays for its end.
"""

import os
import subprocess
import sys
import threading
import time

import pytest

from unisono.errors import CollectiveTimeout, PeerLostError
from unisono.runtime.monitor import Loss
from unisono.runtime.task import copy_error, first_line
from unisono.transport.layout import EXIT_NOTE, Layout
from unisono.transport.process import Identity, alive, start_time
from unisono.transport.segment import create
from unisono.watch import exit_notes
from unisono.watch.exit_notes import as_sentence, exit_note, lost, read_exit_note

DEAD = Loss("rank 2 (pid 80 on node1) is dead: killed by SIGKILL")


class Shelf:
    """A store of one process."""

    def set(self, key: str, value: str) -> None: ...


def test_a_chain_of_relays_names_the_first_victim() -> None:
    error = lost("barrier() can not end: rank 2 missing", [DEAD])
    for relay in range(20):
        here = f"rank {relay + 3} (pid {relay} on node1) ended by ValueError: {'x' * 3000}"
        left = read_exit_note(exit_note(here, error.cause))
        error = lost(f"{'all_reduce' * 100}() can not end", [left])
        assert f"(): {DEAD.words}; " not in here
        assert f"() can not end: {DEAD.words}; rank {relay + 3} (pid {relay} on node1)" in str(error)
        assert error.cause == DEAD.words


def test_what_is_passed_on_stays_short_and_names_everybody() -> None:
    several = [Loss(f"rank {r} (pid {r}0 on node1) ended by ValueError: {'ä' * 5000}\nand more") for r in (4, 5)]
    cause = lost("barrier() can not end", several).cause
    assert len(cause) <= 1200
    assert "\n" not in cause
    assert all(f"rank {r} (pid {r}0 on node1) ended by ValueError" in cause for r in (4, 5))
    crowd = lost("barrier() can not end", [Loss(f"rank {r} {'z' * 300}") for r in range(100)]).cause
    assert len(crowd) == 1200
    assert crowd.startswith("rank 0 ")


def test_one_cause_is_said_once() -> None:
    over_it = [Loss(f"rank {r} has given this group up over it", DEAD.words) for r in (0, 1)]
    assert str(lost("barrier() can not end", [*over_it, DEAD])) == (
        f"barrier() can not end: {DEAD.words}; rank 0 has given this group up over it; "
        "rank 1 has given this group up over it"
    )


def test_a_long_text_is_said_once_of_all_who_left_it() -> None:
    chain, short = "ended by DeadlockError: " + "rank 0 waits; " * 30, "ended by KeyError: 3"
    who = [f"rank {r} (pid 8{r} on node1)" for r in range(5)]
    error = lost("barrier() can not end", [Loss(f"{who[r]} {chain if r < 3 else short}") for r in range(5)])
    assert str(error) == (
        f"barrier() can not end: {who[0]} {chain}; likewise {who[1]}; likewise {who[2]}; {who[3]} {short}; "
        f"{who[4]} {short}"
    )
    assert all(f"{who[r]} ended by DeadlockError" in error.cause for r in (0, 1))


def test_a_rank_to_blame_itself_has_no_cause_before_its_words() -> None:
    assert read_exit_note(exit_note("ended by ValueError: a\nb")) == Loss("ended by ValueError: a\nb", "")
    assert read_exit_note("") == Loss("", "")
    assert as_sentence(exit_note("has left", DEAD.words)) == f"has left ({DEAD.words})"
    assert as_sentence(exit_note(f"read that {DEAD.words}", DEAD.words)) == f"read that {DEAD.words}"


def test_a_copy_of_an_error_keeps_its_cause_but_no_traceback() -> None:
    try:
        raise lost("barrier() can not end", [DEAD])
    except PeerLostError as error:
        copy = copy_error(error)
    assert (type(copy), str(copy), copy.cause, copy.__traceback__) == (PeerLostError, str(copy), DEAD.words, None)
    assert copy_error(CollectiveTimeout("late")).cause == ""
    assert first_line(CollectiveTimeout("late:\nwhere")) == "late"


def test_a_text_that_is_written_again_while_it_is_read_is_never_torn() -> None:
    interval = sys.getswitchinterval()
    segment, fd = create(Shelf(), 2, "torn")
    os.close(fd)
    texts = {"a" * 20, "b" * 4000, "c" * 700, "ä" * 3000}
    whole = {text.encode()[: Layout.TEXT - 8].decode("utf-8", "replace") for text in texts}
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            for text in texts:
                segment.set_text(1, EXIT_NOTE, text)

    segment.set_text(1, EXIT_NOTE, "a" * 20)
    writer = threading.Thread(target=write)
    sys.setswitchinterval(1e-6)
    try:
        writer.start()
        read: list[str] = []
        while len(read) < 2000 or len(set(read) - {""}) < 2:
            read.append(segment.text(1, EXIT_NOTE))
    finally:
        done.set()
        writer.join()
        sys.setswitchinterval(interval)
    assert set(read) <= whole | {""}
    assert segment.text(0, EXIT_NOTE) == ""


@pytest.mark.parametrize(("starved", "limit", "ended"), [(True, 60.0, True), (True, 0.1, False), (False, 60.0, False)])
def test_the_time_in_which_a_lost_peer_waits_for_a_core_is_granted(
    monkeypatch: pytest.MonkeyPatch, starved: bool, limit: float, ended: bool
) -> None:
    monkeypatch.setattr(exit_notes, "_ENDING", 0.1)
    monkeypatch.setattr(exit_notes, "_BUSY", limit)
    monkeypatch.setattr(exit_notes, "run_delay", lambda peer: time.monotonic() if starved else 0.0)
    with subprocess.Popen(["sleep", "0.6"]) as child:
        peer = Identity(child.pid, start_time(child.pid))
        exit_notes.follow([peer])
        exit_notes.stay()
        assert alive(peer) is not ended

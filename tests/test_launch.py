"""The launcher of local ranks: messages, requests with answers, failures. The job's own tests end ranks by signals."""

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from unisono.errors import PeerLostError, UnisonoError
from unisono.launch import local_ranks


def greet(rank: int, pipe: Connection, init_method: str, words: str) -> None:
    for number in range(2):
        pipe.send((rank, number, words, init_method))


def serve(rank: int, pipe: Connection, init_method: str) -> None:
    """Answers until the pipe closes, or as it is asked to."""
    while True:
        match pipe.recv():
            case "raise":
                assert rank, "rank 0 will not"
                time.sleep(60)
            case "leave":
                return
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case number:
                pipe.send(number + rank)


def test_messages_come_until_all_have_ended_well() -> None:
    with local_ranks("test_launch:greet", 3, "hello") as ranks:
        came = list(ranks.messages())
    assert sorted(message[:3] for message in came) == [(rank, n, "hello") for rank in range(3) for n in range(2)]
    meetings = {message[3] for message in came}
    assert len(meetings) == 1
    folder = Path(meetings.pop().removeprefix("file://")).parent
    assert not folder.exists()


def test_every_rank_answers_a_request() -> None:
    with local_ranks("test_launch:serve", 3) as ranks:
        assert [ranks.ask(number) for number in (10, 20)] == [[10, 11, 12], [20, 21, 22]]
        processes = ranks.processes
    assert not any(process.is_alive() for process in processes)


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        ("raise", UnisonoError, r"^rank 0 failed: AssertionError: rank 0 will not .*\(test_launch.py:\d+\)$"),
        ("kill", PeerLostError, r"^rank \d failed: process \d+ was ended by SIGKILL$"),
        ("leave", PeerLostError, r"^rank 0 ended without an answer$"),
    ],
)
def test_a_rank_that_does_not_answer_is_named(request_: str, error: type[UnisonoError], words: str) -> None:
    with local_ranks("test_launch:serve", 2) as ranks, pytest.raises(error, match=words):
        ranks.ask(request_)


def test_a_function_that_is_not_there_is_a_failure_of_the_rank() -> None:
    with (
        local_ranks("test_launch:nothing", 1) as ranks,
        pytest.raises(UnisonoError, match=r"^rank 0 failed: Attribute"),
    ):
        list(ranks.messages())

"""The launcher of local ranks: messages and failures. The job's own tests end ranks by signals."""

import os
import signal
import struct
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from unisono.errors import PeerLostError, UnisonoError
from unisono.launch import local_ranks


def greet(rank: int, pipe: Connection, init_method: str, words: str) -> None:
    for number in range(2):
        pipe.send((rank, number, words, init_method))


def fail(rank: int, pipe: Connection, init_method: str, how: str) -> None:
    """Fails on rank 0, as it is asked to; the other rank would run on."""
    if rank:
        time.sleep(60)
    match how:
        case "raise":
            raise ValueError("not today")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "in a message":
            os.write(pipe.fileno(), struct.pack("!i", 1000) + b"the rest does not come")
            os.kill(os.getpid(), signal.SIGKILL)


def test_messages_come_until_all_have_ended_well() -> None:
    with local_ranks("test_launch:greet", 3, "hello") as ranks:
        came = list(ranks.messages())
    assert sorted(message[:3] for message in came) == [(rank, n, "hello") for rank in range(3) for n in range(2)]
    meetings = {message[3] for message in came}
    assert len(meetings) == 1
    folder = Path(meetings.pop().removeprefix("file://")).parent
    assert not folder.exists()


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("raise", UnisonoError, r"^rank 0 failed: ValueError: not today \(test_launch.py:\d+\)$"),
        ("kill", PeerLostError, r"^rank 0 failed: process \d+ was ended by SIGKILL$"),
        ("in a message", PeerLostError, r"^rank 0 failed: process \d+ was ended by SIGKILL$"),
    ],
)
def test_a_rank_that_fails_is_named_and_the_others_end(how: str, error: type[UnisonoError], words: str) -> None:
    with local_ranks("test_launch:fail", 2, how) as ranks:
        with pytest.raises(error, match=words):
            list(ranks.messages())
        processes = ranks.processes
    assert not any(process.is_alive() for process in processes)


def test_a_function_that_is_not_there_is_a_failure_of_the_rank() -> None:
    with (
        local_ranks("test_launch:nothing", 1) as ranks,
        pytest.raises(UnisonoError, match=r"^rank 0 failed: Attribute"),
    ):
        list(ranks.messages())

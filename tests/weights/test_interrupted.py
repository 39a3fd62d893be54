"""A push that is left by Ctrl-C, or by any exception of a signal handler: nothing comes of it later."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from unisono import weights
from unisono.errors import CollectiveTimeout, UpdateError


class Left(BaseException):
    """What the handler raises."""


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """The block is left by an exception after this time."""

    def leave(number: int, frame: Any) -> None:
        raise Left("alarm")

    before = signal.signal(signal.SIGALRM, leave)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(Left):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Waits(weights.ModuleEngine):
    """Stays in its first load until it may go on."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.goes_on = threading.Event()

    def load(self, bucket: Any) -> None:
        super().load(bucket)
        self.goes_on.wait(10)


@pytest.mark.parametrize("joined", [False, True], ids=["nobody is there", "announced"])
def test_a_push_that_is_left_before_anything_moves(joined: bool) -> None:
    model = {"a": torch.zeros(4)}
    with weights.Sender("tcp://127.0.0.1:0", {"a": torch.ones(4)}, timeout=10) as sender:
        receivers = [weights.Receiver(sender.address, model, timeout=10)] if joined else []
        with interrupted(0.1):
            sender.push()
        time.sleep(0.1)  # so that a replica reads with the push that it was given up
        (receiver,) = receivers or [weights.Receiver(sender.address, model, timeout=10)]
        with receiver:
            with pytest.raises(CollectiveTimeout, match=r"is there but has not called push; it has pushed nothing yet"):
                receiver.pull(timeout=0.2)
            for version in (1, 2):
                update = receiver.pull(background=True)
                assert sender.push().version == update.wait(10).version == version


def test_a_push_that_is_left_in_its_midst() -> None:
    engine = Waits({"a": torch.zeros(4)})
    with (
        weights.Sender("tcp://127.0.0.1:0", {"a": torch.ones(4)}, timeout=10) as sender,
        weights.Receiver(sender.address, engine, timeout=10) as receiver,
    ):
        update = receiver.pull(background=True)
        with interrupted(0.3):
            sender.push()
        engine.goes_on.set()
        with pytest.raises(UpdateError, match=r"sender rank 0 \(pid .* raised Left: alarm; version 1 was given up"):
            update.wait(10)
        update = receiver.pull(background=True)
        assert sender.push().version == update.wait(10).version == 1

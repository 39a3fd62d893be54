"""Threads as ranks: messages in order, and no wait without an end."""

import pytest
import torch

from unisono.errors import CollectiveTimeout, DeadlockError, MismatchError, PeerLostError, UsageError
from unisono.transport.loopback import Loopback, loopback, run_loopback


def test_messages_keep_their_order_and_their_values() -> None:
    def main(transport: Loopback) -> list[float]:
        other, x = 1 - transport.rank, torch.empty(2)
        got = []
        for i in range(3):
            x.fill_(10 * transport.rank + i)
            transport.send(other, x)
        for _ in range(3):
            transport.receive(other, x)
            got.append(float(x[1]))
        return got

    assert run_loopback(2, main) == [[10, 11, 12], [0, 1, 2]]


def test_ranks_can_be_used_without_threads_of_ours() -> None:
    with loopback(2) as (a, b):
        a.send(1, torch.arange(3))
        x = torch.empty(3, dtype=torch.int64)
        b.receive(0, x)
        assert x.tolist() == [0, 1, 2]
        wait = a.post([], [(1, x)])[0]
    with pytest.raises(PeerLostError, match="rank 1, which has ended"):
        wait()


def test_a_circle_of_waits_is_a_deadlock_for_everybody() -> None:
    seen = []

    def main(transport: Loopback) -> None:
        try:
            transport.receive((transport.rank + 1) % 3, torch.empty(1))
        except DeadlockError as error:
            seen.append(str(error))
            raise

    with pytest.raises(
        DeadlockError, match="rank 0 waits for rank 1, rank 1 waits for rank 2, rank 2 waits for rank 0"
    ):
        run_loopback(3, main)
    assert len(seen) == 3


def test_the_first_cause_is_raised_not_its_echo() -> None:
    def main(transport: Loopback) -> None:
        if transport.rank == 2:
            raise KeyError("the cause")
        transport.receive(2, torch.empty(1))

    with pytest.raises(KeyError, match="the cause") as caught:
        run_loopback(3, main)
    assert caught.value.__notes__ == ["raised by rank 2 of 3"]


def test_a_missing_message_ends_in_time() -> None:
    late = pytest.raises(CollectiveTimeout, match=r"rank 0 got no message from rank 1 in 0.05 s")
    with loopback(2, timeout=0.05) as (a, _), late:
        a.receive(1, torch.empty(1))


def test_sizes_and_peers_are_checked() -> None:
    with loopback(2) as (a, b):
        a.send(1, torch.ones(3))
        with pytest.raises(MismatchError, match="expects 8 bytes from rank 0, which sent 12"):
            b.receive(0, torch.ones(2))
        for peer in (0, 2, -1):
            with pytest.raises(UsageError, match=f"has no peer {peer}"):
                a.send(peer, torch.ones(1))
    with pytest.raises(UsageError, match="at least 1 rank"), loopback(0):
        pass

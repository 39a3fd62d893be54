"""Messages that nobody receives: a receive that waits beside one names it; who leaves last tells of it."""

import logging
import time

import pytest
import torch
import torch.distributed as dist

from hangs.job import Fault, Job, attempt, hurry
from ranks import ranks

SMALL, LARGE = 3, 3_000_000  # elements; the ring holds a part of the large one


def wrong_tag(rank: int, world_size: int, numel: int, source: int | None) -> Fault | None:
    if rank == 1:
        return attempt(lambda: dist.recv(torch.zeros(numel), source, tag=6))
    dist.send(torch.zeros(numel), 1, tag=5)
    dist.destroy_process_group()
    return None


@pytest.mark.parametrize("source", [0, None])
@pytest.mark.parametrize("numel", [SMALL, LARGE])
def test_a_receive_names_the_message_with_another_tag(numel: int, source: int | None) -> None:
    with Job(wrong_tag, 2, numel, source) as job:
        fault = job.results(20)[1]
    named = rf"a message with tag 5 from rank 0 \({numel} elements of float32\) is there: rank 0 .* has left"
    fault.says("PeerLostError", rf"tag 6, .*: 0 of {4 * numel} bytes moved, while {named}")


def late(rank: int, world_size: int) -> Fault:
    """The messages come long after the wait for another one has been published."""
    hurry(5.0)
    if rank == 1:
        return attempt(lambda: dist.recv(torch.zeros(1), 0, tag=9))
    time.sleep(0.3)
    for tag in range(5):
        dist.send(torch.zeros(1), 1, tag=tag)
    return attempt(dist.barrier)


def test_a_deadlock_names_it_too() -> None:
    with Job(late, 2) as job:
        faults = job.results(20)
    for fault in faults:
        fault.says(
            "DeadlockError", r"with tag 0 from rank 0 .* with tag 2 from rank 0 \(.*\) and 2 more are there, at "
        )


def leaving(rank: int, world_size: int, leaves_early: bool, received: int | None) -> list[str]:
    """What is logged as the ranks leave a group in which rank 0 sends three messages to rank 1."""
    gate, group, said = dist.new_group(), dist.new_group(), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unisono").addHandler(handler)
    dist.barrier(group)
    if rank == 1 and leaves_early:
        dist.destroy_process_group(group)
    dist.barrier(gate)
    if rank == 0:
        for tag, numel in SENT.items():
            dist.send(torch.zeros(numel), 1, group=group, tag=tag)
        dist.barrier(gate)
        dist.destroy_process_group(group)
    else:
        dist.barrier(gate)
        if received is not None:
            dist.recv(torch.zeros(SENT[received]), 0, group=group, tag=received)
        if not leaves_early:
            dist.destroy_process_group(group)
    dist.destroy_process_group(gate)
    logging.getLogger("unisono").removeHandler(handler)
    return said


SENT = {1: 3, 2: 16, 3: 17}  # elements by tag
TEXTS = {tag: f"a message with tag {tag} from rank 0 ({numel} elements of float32)" for tag, numel in SENT.items()}


@pytest.mark.parametrize(("received", "left"), [(None, [1, 2, 3]), (1, [2, 3]), (2, [1, 3]), (3, [1, 2])])
def test_what_was_never_received_is_logged(received: int | None, left: list[int]) -> None:
    _, told = ranks(2).run(leaving, False, received)
    (text,) = told
    assert text.startswith("rank 1 leaves group ")
    assert text.endswith(f" and has never received {', '.join(TEXTS[tag] for tag in left)}")


def test_what_was_sent_to_a_rank_that_has_left_is_logged_by_its_sender() -> None:
    (text,), nothing = ranks(2).run(leaving, True, None)
    assert nothing == []
    assert text.startswith("rank 0 leaves group ")
    assert text.endswith("; of its messages, these were never received: 3 to rank 1")

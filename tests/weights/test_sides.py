"""Sides of several ranks that are at odds, or of which one raises: every rank of both sides reads the same."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import ranks
from unisono import weights
from weights.live import Net, attempt, blank, fill, meeting, wrong

Found = list[Any]


def two_sides(rank: int, world_size: int, folder: str, case: Callable[[int], dict[str, Any]]) -> Found:
    """Ranks 0 and 1 push, 2 and 3 pull, twice; ``case``: by rank, what it makes and calls otherwise than usual."""
    side = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    given = case(rank)
    at = {"group": side, "timeout": 10, **given.get("made", {})}
    try:
        if rank < 2:
            with weights.Sender(meeting(folder), given.get("source", fill(Net(), 2)), **at) as sender:
                pushed = given.get("pushed", {})
                found = [attempt(lambda: _waited(sender.push(**pushed)))]
                if not given.get("mended", True):
                    return found
                return [*found, attempt(sender.push, source=fill(Net(), 2)), sender.version]
        model = given.get("model", blank(Net()))
        with weights.Receiver(meeting(folder), model, name="gen", **at) as receiver:
            found = [attempt(receiver.pull, **given.get("pulled", {}))]
            if not given.get("mended", True):
                return [*found, receiver.version]
            return [*found, attempt(receiver.pull), receiver.version, wrong(model, 2)]
    finally:
        dist.barrier()


def _waited(found: Any) -> None:
    if isinstance(found, weights.Update):
        found.wait()


def shapes(rank: int) -> dict[str, Any]:
    return {"source": fill(Net(7 + rank), 1)} if rank < 2 else {}


def dtypes(rank: int) -> dict[str, Any]:
    return {"source": fill(Net().to(torch.float64 if rank else torch.float32), 1)} if rank < 2 else {}


def cuts(rank: int) -> dict[str, Any]:
    return {"mended": False, "made": {"shard": {"embed.weight": 0} if rank == 3 else None}}


def sender_rules(rank: int) -> dict[str, Any]:
    return {"mended": False, "made": {"rules": [weights.rename("up.*", "x.*")]} if rank == 1 else {}}


def buckets(rank: int) -> dict[str, Any]:
    return {"mended": False, "made": {"bucket": 64 << rank} if rank < 2 else {}}


def replica_rules(rank: int) -> dict[str, Any]:
    return {"mended": False, "made": {"rules": [weights.rename("up.*", "x.*")]} if rank == 3 else {}}


def mapped(rank: int) -> dict[str, Any]:
    return {"mended": False, "made": {"mapped": rank == 3} if rank > 1 else {}}


ODDS = [
    (shapes, "sender: the ranks of a side do not agree on what they hold: embed.weight: rank 0 has float32 [7, 4], "
     "rank 1 has float32 [8, 4]; if they are parts of one tensor, declare it: shard={'embed.weight': 0}"),
    (dtypes, "norm.bias: rank 0 has float32 [4], rank 1 has float64 [4]; give it one dtype on all ranks"),
    (cuts, "replica 'gen': the ranks of a side do not agree on what they hold: embed.weight: rank 0 has "
     "float32 [7, 4], rank 1 has float32 [7, 4], part of a tensor cut in dim 0; declare it alike on all ranks, by "),
    (sender_rules, "the ranks of the sender were made with different rules: rank 0 passed [], "
     'rank 1 passed [["rename", "up.*", "x.*"]]; make them alike'),
    (buckets, "the ranks of the sender were made with different bucket: rank 0 passed 64, rank 1 passed 128"),
    (replica_rules, "the ranks of replica 'gen' were made with different rules: rank 0 passed [], "
     'rank 1 passed [["rename", "up.*", "x.*"]]; make them alike'),
    (mapped, "the ranks of replica 'gen' were made with different mapped: rank 0 passed False, rank 1 passed True"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "text"), ODDS)
def test_ranks_at_odds(case: Callable[[int], dict[str, Any]], text: str, tmp_path: Path) -> None:
    for rank, ((kind, words, seconds), *rest) in enumerate(ranks(4).run(two_sides, str(tmp_path), case)):
        assert kind == "MismatchError"
        assert text in words
        assert "version 1 was given up, no version " in words
        assert seconds < 5  # one that comes first waits for the others
        if case in (shapes, dtypes):
            assert [rest[0][0], *rest[1:]] == ["", 1, []][: 3 - (rank < 2)]
        else:
            assert rest == [None][: rank > 1]


def broken() -> Any:
    raise ValueError("the optimizer is on disk")


def source_raises(rank: int) -> dict[str, Any]:
    return {"source": broken} if rank == 1 else {}


def source_raises_in_the_background(rank: int) -> dict[str, Any]:
    return {"pushed": {"background": True}, **source_raises(rank)}


@pytest.mark.parametrize("case", [source_raises, source_raises_in_the_background])
def test_what_one_rank_s_source_raises(case: Callable[[int], dict[str, Any]], tmp_path: Path) -> None:
    first, second, *replicas = ranks(4).run(late_replicas, str(tmp_path), case)
    assert first[0][:2] == ["UpdateError", first[0][1]]
    assert "sender rank 1 (pid " in first[0][1]
    assert "raised ValueError: the optimizer is on disk; version 1 was given up, no version was shown" in first[0][1]
    assert first[0][2] < 1
    assert second[0][:2] == ["ValueError", "the optimizer is on disk"]
    assert [first[1][0], first[2], second[1][0], second[2]] == ["", 1, "", 1]
    assert replicas == [[1, []]] * 2


def late_replicas(rank: int, world_size: int, folder: str, case: Callable[[int], dict[str, Any]]) -> Found:
    """As `two_sides`, but one pull has part in the second push alone, for nothing is announced in the first."""
    if rank < 2:
        return two_sides(rank, world_size, folder, case)
    dist.new_group([0, 1])
    model, side = blank(Net()), dist.new_group([2, 3])
    try:
        with weights.Receiver(meeting(folder), model, name="gen", group=side, timeout=10) as receiver:
            return [receiver.pull().version, wrong(model, 2)]
    finally:
        dist.barrier()


def pushes_late(rank: int, world_size: int, folder: str) -> Found:
    """Rank 1 does not come to the first push; nobody is there to pull."""
    if rank > 1:
        dist.new_group([0, 1])
        dist.barrier()
        return []
    with weights.Sender(meeting(folder), {}, group=dist.new_group([0, 1]), receivers=0, timeout=10) as sender:
        found = []
        if rank == 0:
            found.append(attempt(sender.push, timeout=0.2))
        dist.barrier()
        time.sleep(0.05 * rank)
        return [*found, sender.push().version]


def test_a_rank_that_does_not_push_is_named(tmp_path: Path) -> None:
    first, second, *_ = ranks(4).run(pushes_late, str(tmp_path))
    kind, text, seconds = first[0]
    assert kind == "CollectiveTimeout"
    assert "s sender rank 1 (pid " in text
    assert "has not called push; version 1 was given up, no version was shown before" in text
    assert seconds < 1
    assert [first[1], second] == [1, [1]]

"""Ranks of one replica that hold parts of tensors show a version between the same holds: never a mix over ranks."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import ranks
from unisono import weights
from weights.live import raise_flag, wait_for

LAST = 20


def trains(folder: str, until_seen: bool) -> list[float]:
    """Seconds of each push; a tensor's elements are the version's number. ``until_seen``: by a pass, then the next."""
    model, took = {"w": torch.zeros(4, 6)}, []
    with weights.Sender(f"file://{folder}/meeting", model, group="self", timeout=20) as sender:
        for version in range(1, LAST + 1):
            model["w"].fill_(version)
            began = time.monotonic()
            sender.push()
            took.append(time.monotonic() - began)
            if until_seen:
                wait_for(folder, f"version {version} was seen")
        wait_for(folder, "done")
    return took


def joined(folder: str, receivers: Any, engine: Any, **given: Any) -> weights.Receiver:
    """A rank of the replica."""
    return weights.Receiver(f"file://{folder}/meeting", engine, group=receivers, name="gen", timeout=20, **given)


def serves(rank: int, world_size: int, folder: str) -> Any:
    """Ranks 1 and 2 answer requests, each a pass over both under a hold, while versions come."""
    receivers = dist.new_group([1, 2])
    if rank == 0:
        return trains(folder, until_seen=True)
    part, mixed, seen = torch.zeros(2, 6), list[Any](), set()
    with joined(folder, receivers, {"w": part}, shard={"w": 0}) as receiver:
        receiver.follow()
        end = time.monotonic() + 40
        found = torch.zeros(2)
        while found.min() < LAST and time.monotonic() < end:
            with receiver.hold() as version:
                parts = [torch.zeros(1), torch.zeros(1)]
                dist.all_gather(parts, part[:1, 0].clone(), receivers)
                found = torch.cat(parts)
                if rank == 1:
                    time.sleep(0.002)
                    raise_flag(folder, f"version {version} was seen")
                if len({*found.tolist(), part[1, 5].item(), float(version or 0)}) > 1:
                    mixed.append((version, found.tolist()))
                seen.add(version)
        dist.barrier(receivers)
        raise_flag(folder, "done")
        receiver.verify()
    return mixed, seen


def test_a_pass_over_all_ranks_sees_one_version(tmp_path: Path) -> None:
    _, *replica = ranks(3).run(serves, str(tmp_path))
    assert [mixed for mixed, _ in replica] == [[], []]
    assert all(set(seen) >= {*range(1, LAST + 1)} for _, seen in replica)


def holds_on_one(rank: int, world_size: int, folder: str, way: str) -> Any:
    """Rank 1 holds again and again, rank 2 never: it is not waited for, if its tensors are no part of rank 1's."""
    receivers = dist.new_group([1, 2])
    if rank == 0:
        return trains(folder, until_seen=False)
    part: Any = {"w": torch.zeros(4 if way == "whole" else 2, 6)}
    engine = weights.ModuleEngine(part, standby=False) if way == "in place" and rank == 2 else part
    with joined(folder, receivers, engine, shard=None if way == "whole" else {"w": 0}) as receiver:
        receiver.follow()
        if rank == 1:
            while receiver.version != LAST:
                with receiver.hold():
                    time.sleep(0.001)
        while receiver.version != LAST:
            time.sleep(0.001)
        dist.barrier(receivers)
        raise_flag(folder, "done")
        return receiver.version


@pytest.mark.parametrize("way", ["parts", "whole", "in place"])
def test_ranks_that_do_not_hold_alike_are_not_waited_for_long(way: str, tmp_path: Path) -> None:
    took, *versions = ranks(3).run(holds_on_one, str(tmp_path), way)
    assert versions == [LAST, LAST]
    assert max(took) < 2.0
    assert way != "parts" or max(took[1:]) > 0.2  # rank 2 might have held, had it been about to

"""Mapped replicas: their tensors are copy-on-write views of one published copy."""

import gc
import os
from pathlib import Path
from typing import Any

import torch

from ranks import ranks
from weights.live import Net, attempt, blank, fill, raise_flag, replica, trainer, wait_for, wrong


def copies(kind: str) -> int:
    """The published copies that this process has mapped: p, private, as a replica shows them, or s, shared."""
    gc.collect()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "unisono:published" in line]
    return sum(words[1].endswith(kind) for words in maps)


def mapped(rank: int, world_size: int, folder: str) -> Any:
    if rank == 0:
        model = Net()
        with trainer(folder, model, receivers=3) as sender:
            found = []
            for version in (1, 2, 3, 4):
                fill(model, version)
                found.append(sender.push().version)
            made = copies("s")
            sums = sender.checksums()
        raise_flag(folder, "closed")
        return [found, made, copies("s"), sums]
    model = blank(Net())
    with replica(folder, model, f"gen-{rank}", mapped=rank > 1) as receiver:
        found = []
        for version in (1, 2, 3):
            receiver.pull()
            receiver.verify()
            found.append(wrong(model, version))
        if rank == 2:
            with torch.no_grad():
                model.up.bias.zero_()  # of this replica alone
            error = attempt(receiver.verify)
            found.append([error[0], "up.bias" in error[1]])
        receiver.pull()
        found += [wrong(model, 4), copies("p"), receiver.checksums()]
    wait_for(folder, "closed")
    return [*found, wrong(model, 4), copies("s"), copies("p")]


def test_replicas_share_one_copy(tmp_path: Path) -> None:
    sender, plain, one, two = ranks(4, group=False).run(mapped, str(tmp_path))
    assert sender[:3] == [[1, 2, 3, 4], 2, 0]
    sums = sender[3]
    assert plain == [[], [], [], [], 0, sums, [], 0, 0]
    assert one == [[], [], [], ["CorruptionError", True], [], 2, sums, [], 0, 1]  # the other is the next version's
    assert two == [[], [], [], [], 2, sums, [], 0, 1]


def not_mappable(rank: int, world_size: int, folder: str) -> Any:
    memory = torch.zeros(8)
    if rank == 0:
        with trainer(folder, fill({"a": torch.zeros(4), "b": torch.zeros(4)}, 1)) as sender:
            return [attempt(sender.push), sender.push().version]
    model = {"a": memory[:4], "b": memory[4:]}
    with replica(folder, model, mapped=True) as receiver:
        error = attempt(receiver.pull)
    with replica(folder, model) as receiver:
        return [error, receiver.pull().version, wrong(model, 1), memory.tolist() == [*model["a"], *model["b"]]]


def test_what_can_not_be_mapped_is_named(tmp_path: Path) -> None:
    sender, receiver = ranks(2, group=False).run(not_mappable, str(tmp_path))
    assert receiver[0][0] == "UsageError"
    assert "replica 'gen' can not be mapped: a shares its memory with another tensor" in receiver[0][1]
    assert sender[0][0] == "UpdateError"
    assert "a shares its memory" in sender[0][1]
    assert [sender[1], receiver[1:]] == [1, [1, [], True]]


def survives(rank: int, world_size: int, folder: str) -> Any:
    """The sender's process may end: what is mapped stays."""
    if rank == 0:
        with trainer(folder, fill(Net(), 1)) as sender:
            sender.push()
        return os.getpid()
    model = blank(Net())
    receiver = replica(folder, model, mapped=True)
    receiver.pull()
    receiver.close()
    del receiver
    gc.collect()
    return wrong(model, 1)


def test_a_copy_outlives_both_sides(tmp_path: Path) -> None:
    assert ranks(2, group=False).run(survives, str(tmp_path))[1] == []

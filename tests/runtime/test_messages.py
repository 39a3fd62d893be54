"""Messages in compiled loops arrive as they do without, whichever end uses the loops and wherever these give up."""

import os
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ranks import ranks
from unisono.runtime.messages import MessageQueue

RING = 2 << 20  # bytes between two ranks of a group of two
SIZES = (0, 1, 63, 64, 65, 4096, RING - 65, RING - 64, RING - 63, RING, 3 * RING + 1, 5_000_000)


def pattern(size: int, seed: int) -> torch.Tensor:
    period = ((torch.arange(251) * 31 + seed) % 251).to(torch.uint8)
    return period.repeat(size // 251 + 1)[:size]


def exchange(rank: int, world_size: int, path: str, modes: list[str]) -> tuple[list[int], list[int], int, int]:
    """Sizes that arrived wrong, the sources that were named, messages recorded, and how many were left half way."""
    os.environ["UNISONO_FUSED"] = modes[rank % len(modes)]
    dist.init_process_group("unisono", f"file://{path}", rank=rank, world_size=world_size)
    dist.barrier()
    queue: MessageQueue = dist.distributed_c10d._get_default_group()._group.messages
    rest, halves = queue._rest, []
    queue._rest = lambda *args: halves.append(args) or rest(*args)  # type: ignore[method-assign]
    wrong, sources, peer = [], [], 1 - rank
    for late in ("nobody", "sender", "receiver"):
        for seed, size in enumerate(SIZES):
            for sender in (0, 1):
                if (rank == sender) == (late == "sender") and late != "nobody":
                    time.sleep(0.004)  # beyond a loop's patience: it gives up, before a message or in its midst
                if rank == sender:
                    dist.send(pattern(size, seed), peer, tag=seed)
                else:
                    got = torch.zeros(size, dtype=torch.uint8)
                    sources.append(dist.recv(got, peer, tag=seed))
                    wrong += [] if torch.equal(got, pattern(size, seed)) else [size]
            works = [
                dist.isend(pattern(size, seed), peer),
                dist.irecv(got := torch.zeros(size, dtype=torch.uint8), peer),
            ]
            for work in works:
                work.wait()
                assert work.is_completed()
            wrong += [] if torch.equal(got, pattern(size, seed)) else [size]
    recorded = sum(note.ended > 0 and note.number > 0 for note in queue.monitor.messages.notes)
    dist.barrier()
    dist.destroy_process_group()
    return wrong, sources, recorded, len(halves)


@pytest.mark.parametrize("modes", [["now"], ["now", "0"], ["0"]], ids=["loops", "mixed", "torch"])
def test_what_is_sent_arrives(modes: list[str], tmp_path: Path) -> None:
    told = ranks(2, group=False).run(exchange, str(tmp_path / "meeting"), modes)
    for rank, (wrong, sources, recorded, halves) in enumerate(told):
        assert wrong == []
        assert sources == [1 - rank] * 3 * len(SIZES)
        assert recorded == 3 * len(SIZES) * 4
        assert halves > 0  # else the loops' giving up was not tested


def crossing(rank: int, world_size: int, path: str, modes: list[str]) -> list[str]:
    """Each rank has messages under way to and from all others, out of step, and waits for them in another order."""
    os.environ["UNISONO_FUSED"] = modes[rank % len(modes)]
    dist.init_process_group("unisono", f"file://{path}", rank=rank, world_size=world_size)
    peers = [peer for peer in range(world_size) if peer != rank]
    wrong = []
    for sizes in ((3 * RING + 1, 1, RING), (0, 2 * RING, 70), (100, 200, 300)):
        sends = [
            dist.isend(pattern(size, 7 * rank + tag), peer, tag=tag) for tag, size in enumerate(sizes) for peer in peers
        ]
        kept = [
            (peer, tag, torch.zeros(sizes[tag], dtype=torch.uint8)) for tag in (1, 2, 0) for peer in reversed(peers)
        ]
        kept = kept[rank:] + kept[:rank]
        receives = [dist.irecv(got, peer, tag=tag) for peer, tag, got in kept]
        for work in [*receives[::-1], *sends] if rank % 2 else [*sends[::-1], *receives]:
            work.wait()
        wrong += [
            f"{tag} of {peer}" for peer, tag, got in kept if not torch.equal(got, pattern(len(got), 7 * peer + tag))
        ]
    queue: MessageQueue = dist.distributed_c10d._get_default_group()._group.messages
    wrong += ["still busy"] if queue.busy() else []
    dist.barrier()
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("modes", [["now"], ["now", "0"]], ids=["loops", "mixed"])
def test_messages_that_cross(modes: list[str], tmp_path: Path) -> None:
    assert ranks(3, group=False).run(crossing, str(tmp_path / "meeting"), modes) == [[]] * 3


def unattended(rank: int, world_size: int, path: str) -> tuple[bool, bool]:
    """What rank 0 has issued is sent and received, though it does nothing for it until all has gone through."""
    os.environ["UNISONO_FUSED"] = "now"
    dist.init_process_group("unisono", f"file://{path}", rank=rank, world_size=world_size)
    store, size, peer = dist.FileStore(f"{path}-done", world_size), 3 * RING, 1 - rank
    got, gone = torch.zeros(size, dtype=torch.uint8), False
    for _ in range(100):  # so that the worker has got used to a caller who comes at once
        works = [dist.isend(pattern(size, rank), peer), dist.irecv(got, peer)]
        for work in works:
            work.wait()
    works = [dist.isend(pattern(size, rank), peer), dist.irecv(got, peer)]
    until = time.monotonic() + 20
    while rank == 0 and not gone and time.monotonic() < until:
        gone = store.check(["done"])
        time.sleep(0.001)
    for work in works:
        work.wait()
    store.set("done", "")
    dist.barrier()
    dist.destroy_process_group()
    return gone or rank == 1, torch.equal(got, pattern(size, peer))


def test_nobody_need_wait(tmp_path: Path) -> None:
    assert ranks(2, group=False).run(unattended, str(tmp_path / "meeting")) == [(True, True)] * 2


def others_first(rank: int, world_size: int, path: str) -> list[list[float]]:
    """What is not next in the ring is taken the long way: other tags, a receive from anybody before it."""
    os.environ["UNISONO_FUSED"] = "now"
    dist.init_process_group("unisono", f"file://{path}", rank=rank, world_size=world_size)
    got = [torch.zeros(2) for _ in range(4)]
    if rank == 0:
        for k in range(4):
            dist.send(torch.full((2,), float(k)), 1, tag=k % 3)
    else:
        dist.recv(got[2], 0, tag=2)
        dist.recv(got[1], 0, tag=1)
        dist.recv(got[0])
        dist.recv(got[3], 0)
    dist.barrier()
    dist.destroy_process_group()
    return [x.tolist() for x in got]


def receives_first(rank: int, world_size: int) -> list[int]:
    """The patience, in ns, of each look for a message that is not there: first on rank 1, then on rank 0, too."""
    queue: MessageQueue = dist.distributed_c10d._get_default_group()._group.messages
    looks, progress = [], queue._control.progress
    with patch.object(queue._control, "progress", lambda *given: looks.append(given[-1]) or progress(*given)):
        if rank == 0:
            dist.barrier()  # rank 1 has posted its receive
        got = torch.zeros(1)
        receive = dist.irecv(got, 1 - rank)
        found = list(looks)
        if rank == 1:
            dist.barrier()
        dist.barrier()
        dist.isend(torch.ones(1), 1 - rank).wait()
        receive.wait()
    assert got.item() == 1.0
    return found


def test_a_receive_does_not_poll_while_its_peer_waits_for_this_rank() -> None:
    waiting, first = ranks(2).run(receives_first)
    assert waiting == [0]
    assert sum(first) >= 20_000


def test_messages_out_of_turn(tmp_path: Path) -> None:
    told = ranks(2, group=False).run(others_first, str(tmp_path / "meeting"))
    assert told[1] == [[float(k)] * 2 for k in range(4)]


def half_way(rank: int, world_size: int, path: str) -> list[float]:
    """The head of a message is the last that fits into the ring; its one element lies at a stride of five."""
    os.environ["UNISONO_FUSED"] = "now"
    dist.init_process_group("unisono", f"file://{path}", rank=rank, world_size=world_size)
    filling, odd = torch.ones(RING - 2 * 64, dtype=torch.uint8), torch.arange(7.0, 17.0)[::5][:1]
    assert (odd.is_contiguous(), odd.stride()) == (True, (5,))
    if rank == 0:
        dist.send(filling, 1)
        work = dist.isend(odd, 1)
        done = work.is_completed()  # beyond the ring's end: not before the receiver takes something
        dist.barrier()
        work.wait()
        dist.send(torch.tensor([2.0]), 1)
        found = [float(done)]
    else:
        dist.barrier()
        got, last = torch.zeros(10)[::5][:1], torch.zeros(1)
        dist.recv(torch.empty_like(filling), 0)
        work = dist.irecv(got, 0)
        work.wait()
        dist.recv(last, 0)
        found = [got.item(), last.item(), work._source_rank()]
    dist.destroy_process_group()
    return found


def test_a_message_cut_behind_its_head(tmp_path: Path) -> None:
    told = ranks(2, group=False).run(half_way, str(tmp_path / "meeting"))
    assert told == [[0.0], [7.0, 2.0, 0.0]]

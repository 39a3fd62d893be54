"""Memory of an update: at most two buckets beyond models, standby and snapshot; mapped replicas have none of their own.

Resident memory at its peak, as Linux counts it, in processes of their own.
"""

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unisono import weights
from weights.live import apart, raise_flag, replica, trainer, wait_for
from weights.test_lost import playing

MIB = 1 << 20
M_MMAP_THRESHOLD = -3  # malloc.h
BUCKET, MODEL, SLACK = 4 * MIB, 48 * MIB, 6 * MIB


def model() -> dict[str, torch.Tensor]:
    """48 MiB in 24 tensors."""
    return {f"layer.{i}.weight": torch.ones(512, 1024) for i in range(24)}


def resident(what: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at the peak, RssAnon of its own."""
    found = re.search(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def peak(call: Callable[[], object]) -> int:
    """Bytes that a call needs at its peak beyond what was there before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def rows(count: int) -> dict[str, torch.Tensor]:
    """A part of the model by rows."""
    return {f"layer.{i}.weight": torch.ones(512 // count, 1024) for i in range(24)}


def columns(count: int) -> dict[str, torch.Tensor]:
    """A part of the model by columns."""
    return {f"layer.{i}.weight": torch.ones(512, 1024 // count) for i in range(24)}


def warmed(folder: str, role: str) -> None:
    """Loads code, and whatever else is not of the model."""
    address = f"{folder}/{role}"
    Path(address).mkdir()
    with trainer(address, {"a": torch.zeros(9)}) as sender, replica(address, {"a": torch.zeros(9)}) as receiver:
        update = receiver.pull(background=True)
        sender.push()
        update.wait()


def sends(folder: str, distant: bool, replicas: int, background: bool) -> Any:
    with apart(distant):
        warmed(folder, "sender")
        source = model()

        def push() -> None:
            with trainer(folder, source, receivers=replicas, bucket=BUCKET, timeout=30.0) as sender:
                for _ in range(3):
                    made = sender.push(background=background)
                    report = made.wait() if background else made
                assert report.snapshot == MODEL * background

        found = peak(push)
        raise_flag(folder, "ended")
        return found


def receives(folder: str, distant: bool, name: str, mapped: bool) -> Any:
    """The peak, and what of this process's own memory is left of the tensors once it is over."""
    with apart(distant):
        warmed(folder, name)
        before = resident("RssAnon")
        into, kept = model(), list[weights.Receiver]()

        def pull() -> None:
            kept.append(replica(folder, into, name, mapped=mapped, timeout=30.0))
            for _ in range(3):
                kept[0].pull()

        found = peak(pull)
        gc.collect()
        wait_for(folder, "ended")
        return found, resident("RssAnon") - before


@pytest.mark.parametrize("distant", [False, True], ids=["one host", "apart"])
def test_two_buckets_beyond_models_standby_and_snapshot(distant: bool, tmp_path: Path) -> None:
    roles = [(sends, distant, 2, True), (receives, distant, "gen-1", False), (receives, distant, "gen-2", False)]
    with playing(tmp_path, *roles) as (sender, *receivers):
        assert sender.result() < MODEL + 2 * BUCKET + SLACK  # the snapshot
        for each in receivers:
            most, kept = each.result()
            assert most < MODEL + 2 * BUCKET + SLACK  # the standby
            assert kept < 2 * MODEL + 2 * BUCKET + SLACK


BUCKETS = (4 * MIB, 12 * MIB, 16 * MIB)  # less than a sender's part, all of it, more


def reshards(folder: str, side: str, rank: int, count: int) -> list[int]:
    """The peaks of a rank of a side, in the first updates and the later ones, by the size of buckets."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB // 2)  # what is freed is given back at once
    warmed(folder, f"{side}-{rank}")
    dist.init_process_group("gloo", init_method=f"file://{folder}/{side}", rank=rank, world_size=count)
    part = rows(count) if side == "sender" else columns(count)

    def update(bucket: int) -> None:
        address = f"file://{folder}/{bucket}"
        if side == "sender":
            with weights.Sender(address, part, shard={"*": 0}, bucket=bucket, timeout=30.0) as sender:
                for _ in range(4):
                    sender.push()
        else:
            with weights.Receiver(address, part, shard={"*": 1}, name="gen", timeout=30.0) as receiver:
                for _ in range(4):
                    receiver.pull()

    found = []
    for bucket in BUCKETS:
        found.append(peak(lambda: update(bucket)))  # noqa: B023
        dist.barrier()
    dist.destroy_process_group()
    return found


def test_two_buckets_in_a_reshard_from_4_to_2(tmp_path: Path) -> None:
    """What a process maps of others counts too: the buckets of all senders, what replicas expose."""
    sides = [("sender", rank, 4) for rank in range(4)] + [("replica", rank, 2) for rank in range(2)]
    with playing(tmp_path, *((reshards, *side) for side in sides)) as processes:
        found = [process.result() for process in processes]
    for bucket, peaks in zip(BUCKETS, zip(*found, strict=True), strict=True):
        assert max(peaks[:4]) < 2 * bucket + SLACK
        assert max(peaks[4:]) < MODEL // 2 + 2 * bucket + SLACK  # the standby


def test_mapped_replicas_have_no_weights_of_their_own(tmp_path: Path) -> None:
    roles = [(sends, False, 2, False), (receives, False, "gen-1", True), (receives, False, "gen-2", True)]
    with playing(tmp_path, *roles) as (_, *receivers):
        for each in receivers:
            most, kept = each.result()
            assert most < 2 * MODEL + SLACK  # the version shown, and the next one, which all share
            assert kept < SLACK

"""Two torchruns on one address: an FSDP2 trainer and a tensor-parallel replica, either one killed and started again."""

import json
import os
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

import agents

PROGRAM = Path(__file__).with_name("programs.py")
Line = tuple[int, int, dict[str, str]]


def start(side: str, folder: Path, name: str, first: int = 0) -> ForkServerProcess:
    words = f"{PROGRAM} {side} file://{folder}/meeting {first} {folder}/{name}"
    return agents.start(f"--standalone --nproc-per-node 2 {words}", folder / f"{name}.printed")


def lines(folder: Path, name: str) -> list[Line]:
    """What rank 0 has noted, of versions that both ranks have, and on which both agree."""
    files = [folder / f"{name}.{rank}" for rank in (0, 1)]
    found = [[json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [] for file in files]
    for mine, other in zip(*found, strict=False):
        assert (mine[0], mine[2]) == (other[0], other[2])
    return found[0][: len(found[1])]


def wait_for(folder: Path, name: str, count: int, least: int = 0) -> list[Line]:
    """Until there are so many versions from ``least`` on."""
    end = time.monotonic() + 60
    while len(found := [line for line in lines(folder, name) if line[0] >= least]) < count:
        printed = folder / f"{name}.printed"
        assert time.monotonic() < end, printed.read_text()[-3000:] if printed.exists() else "never started"
        time.sleep(0.05)
    return found


@pytest.mark.timeout(240)
def test_either_one_is_killed_and_started_again(tmp_path: Path) -> None:
    running = [start("replica", tmp_path, "replica"), start("trainer", tmp_path, "trainer", 1)]
    try:
        wait_for(tmp_path, "replica", 3)
        os.kill(wait_for(tmp_path, "trainer", 1)[0][1], signal.SIGKILL)
        running.append(start("trainer", tmp_path, "second-trainer", 10_000))
        last = wait_for(tmp_path, "replica", 2, least=10_000)[0]
        os.kill(last[1], signal.SIGKILL)
        running.append(start("replica", tmp_path, "second-replica"))
        wait_for(tmp_path, "second-replica", 2, least=10_000)
    finally:
        for agent in running:
            agents.end(agent, 0.0)
    sent = {version: sums for name in ("trainer", "second-trainer") for version, _, sums in lines(tmp_path, name)}
    taken = [line for name in ("replica", "second-replica") for line in lines(tmp_path, name)]
    both = [(sent[version], sums) for version, _, sums in taken if version in sent]
    assert len(both) >= 6
    assert all(mine == theirs and len(mine) == 4 for mine, theirs in both)

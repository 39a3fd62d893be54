"""Elastic torchrun: a rank whose host is lost is gone at once, by `shrink`; another one joins again at a step."""

import os
import signal
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

import pytest

import agents
from ports import free_port

PROGRAM = """
import os, sys, time
import torch, torch.distributed as dist
import unisono

folder, host = sys.argv[1:]
dist.init_process_group("unisono")
state = torch.load(f"{folder}/state") if os.path.exists(f"{folder}/state") else {"step": torch.zeros(())}
while True:
    x = torch.tensor([1.0, float(os.path.exists(f"{folder}/finish"))])
    try:
        dist.all_reduce(x)
    except unisono.PeerLostError:
        unisono.shrink()
        continue
    state["step"] += 1
    assert x[0] == dist.get_world_size()
    if dist.get_rank() == 0:
        torch.save(state, f"{folder}/state.new")
        os.replace(f"{folder}/state.new", f"{folder}/state")
    with open(f"{folder}/steps", "a") as file:
        print(host, os.getpid(), int(state["step"]), dist.get_world_size(), file=file)
    if x[1]:
        break
    time.sleep(0.05)
dist.destroy_process_group()
"""

# With the first of these set to 0, its default, torch 2.13 publishes the address of rank 0 to the first ranks alone.
SETTINGS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


class Step(NamedTuple):
    """A step that a rank of an agent has made."""

    host: str
    pid: int
    number: int
    world_size: int


def steps(folder: Path) -> list[Step]:
    lines = (folder / "steps").read_text().splitlines() if (folder / "steps").exists() else []
    return [Step(host, *map(int, rest)) for host, *rest in map(str.split, lines)]


def until_last(folder: Path, host: str, world_size: int, since: int = 0) -> list[Step]:
    """Waits until a host's rank has made three steps beside so many; returns its steps."""
    deadline = time.monotonic() + 60.0
    while True:
        found = [step for step in steps(folder) if step.number > since and step.host == host]
        if [step.world_size for step in found][-3:] == [world_size] * 3:
            return found
        assert time.monotonic() < deadline, found[-5:]
        time.sleep(0.05)


@pytest.mark.timeout(200)
def test_survivors_go_on_and_a_new_rank_joins_again(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    port = free_port()

    def agent(host: str) -> ForkServerProcess:
        how = f"--nnodes 1:2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port}"
        more = f"--rdzv-id job --rdzv-conf is_host={int(host == 'first')},keep_alive_interval=1"
        return agents.start(
            f"{how} {more} {tmp_path}/program.py {tmp_path} {host}",
            tmp_path / f"printed by {host}",
            environment=SETTINGS,
        )

    first, second = agent("first"), agent("second")
    try:
        together = until_last(tmp_path, "first", 2)
        assert second.pid is not None
        os.kill(second.pid, signal.SIGKILL)
        os.kill(next(step.pid for step in steps(tmp_path) if step.host == "second"), signal.SIGKILL)
        alone = until_last(tmp_path, "first", 1, together[-1].number)
        third = agent("third")
        again = until_last(tmp_path, "first", 2, alone[-1].number)
        (tmp_path / "finish").touch()
        codes = [agents.end(first), agents.end(third)]
    finally:
        for each in (first, second):
            each.kill()
    mine = [step for step in steps(tmp_path) if step.host == "first"]
    assert codes == [0, 0]
    numbers = [step.number for step in mine]
    assert numbers == sorted(numbers)
    assert alone[-1].pid == mine[0].pid  # no process has ended to go on
    assert again[-1].pid != mine[0].pid  # torchrun has started it again, with the state of the last step
    began = next(step.number for step in mine if step.pid == again[-1].pid)
    # The second step after it, if it ended between the state of a step and the line that says so.
    assert began - max(step.number for step in mine if step.pid == mine[0].pid) in (0, 1, 2)

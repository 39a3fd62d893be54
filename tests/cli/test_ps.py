import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from typer.testing import CliRunner, Result

from hangs.job import Job, tell
from unisono.cli import ps
from unisono.cli.main import app
from unisono.transport.process import Identity
from unisono.watch.status import GroupStatus, RankStatus, snapshot
from unisono.watch.status import Job as JobStatus


def _ps(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["ps", *map(str, arguments)], env={"COLUMNS": "110"})


def one_sleeps(rank: int, world_size: int) -> None:
    dist.barrier()
    if rank == 1:
        tell("asleep")
        time.sleep(60)
    dist.all_reduce(torch.ones(1024))


@pytest.fixture(scope="module")
def hung() -> Iterator[Job]:
    with Job(one_sleeps, 3) as job:
        job.hear("asleep", [1])
        end = time.monotonic() + 20
        while not all(rank.seconds > 1.1 for rank in snapshot(job.pid(0))[0].ranks):
            assert time.monotonic() < end
            time.sleep(0.1)
        yield job


def test_a_hung_job_at_a_glance(hung: Job) -> None:
    result = _ps(hung.pid(0))
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["rank", "pid", "in", "bytes", "call", "no.", "for", "behind"] in lines
    first = next(line for line in lines if line[:2] == ["0", str(hung.pid(0))])
    assert first[2:8] == ["all_reduce(float32", "[1024],", "SUM)", "4", "KiB", "2"]
    assert any(line[:4] == ["waits", "for", "rank", "1"] and line[-1] == "one_sleeps" for line in lines)
    assert any(line[1:5] == [str(hung.pid(1)), "outside", "unisono", "last"] for line in lines)
    assert ["the", "default", "group", "0-2", "1", "idle"] in lines
    assert "● rank 1 keeps ranks 0, 2 waiting for " in result.stdout


def test_json(hung: Job) -> None:
    result = _ps("--json", "--stacks", hung.pid(2))
    (job,) = json.loads(result.stdout)
    assert [rank["pid"] for rank in job["ranks"]] == [hung.pid(rank) for rank in range(3)]
    assert [rank["state"] for rank in job["ranks"]] == ["waiting", "elsewhere", "waiting"]
    assert job["ranks"][0]["waits_for"] == [1]
    assert "in one_sleeps" in job["ranks"][1]["stacks"]
    assert job["groups"][0]["ranks"] == [0, 1, 2]


def test_stacks(hung: Job) -> None:
    text = _ps(hung.pid(0), "--stacks").stdout
    after = text[text.index("\nrank 1\n") :]
    assert after.splitlines()[2] == "thread MainThread:"
    assert "in one_sleeps" in after.partition("rank 2")[0]


def test_dump(hung: Job, tmp_path: Path) -> None:
    result = _ps(hung.pid(0), "--dump", tmp_path / "record")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [f"rank {r} wrote {tmp_path}/record/flight_rank_{r}" for r in range(3)]
    assert sorted(path.name for path in (tmp_path / "record").iterdir()) == [f"flight_rank_{r}" for r in range(3)]
    (tmp_path / "file").write_text("")
    result = _ps(hung.pid(0), "--dump", tmp_path / "file")
    assert result.exit_code == 1
    assert "rank 0: cannot write the flight record" in result.stdout


def test_looking_starts_nothing_and_leaves_the_job_alone(hung: Job) -> None:
    pid = hung.pid(1)
    before = psutil.Process(pid).num_threads(), len(os.listdir(f"/proc/{pid}/fd")), os.stat(f"/proc/{pid}").st_ctime
    assert _ps(pid).exit_code == 0
    assert before == (
        psutil.Process(pid).num_threads(),
        len(os.listdir(f"/proc/{pid}/fd")),
        os.stat(f"/proc/{pid}").st_ctime,
    )


@pytest.mark.parametrize("options", [[], ["--stacks"], ["--dump", "record"]])
def test_no_job(options: list[str]) -> None:
    result = _ps(2**22 - 1, *options)
    assert result.exit_code == 1
    assert result.stdout.startswith("no job that process 4194303 is a rank of or started runs on unisono on this host.")
    assert "Only jobs of the same user" in result.stdout
    assert json.loads(_ps(2**22 - 1, "--json").stdout) == []


def test_mistakes() -> None:
    result = _ps("--interval", "0")
    assert result.exit_code == 2
    assert result.stderr == "unisono: --interval is 0, expected 0.05 to 3600 seconds\n"


def _picture(job: JobStatus, width: int) -> list[str]:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(ps._job(job, width))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_every_state_fits_its_line() -> None:
    ranks = (
        RankStatus(
            0, 100, "waiting", "all_reduce(float32 [4], SUM)", 7, 16, "group 2 [0, 1]", 75.0, (1, 2, 3), 1,
            "/home/me/train.py:9 in main", late=0.002,
        ),
        RankStatus(1, 101, "stopped", "barrier()", 6, 0, "the default group", 75.0, late=0.04, straggler=True),
        RankStatus(2, 102, "dead", words="killed by SIGKILL"),
        RankStatus(3, 0, "absent", words="has not joined"),
        RankStatus(
            4, 104, "elsewhere", "barrier()", 6, 0, "the default group", 0.25, pending=2,
            gpu_call="broadcast(int64 [1])", gpu_number=1234, gpu_group="the default group",
        ),
    )  # fmt: skip
    groups = (
        GroupStatus("group 2 [0, 1]", (0, 1), 6, 7, 12.34, 8),
        GroupStatus("the default group", (0, 2), 6, 7, 0, 0),
    )
    job = JobStatus(100, "python train.py", 4000.0, ranks, groups, ("rank 2 is dead",), {0: Identity(100, 1)})
    assert _picture(job, 110) == [
        "python train.py   4 of 5 ranks, up 1 h 6 min",
        "",
        " rank  pid  in                                            bytes  call no.         for  behind",
        "    0  100  all_reduce(float32 [4], SUM)  group 2 [0, 1]   16 B         7  1 min 15 s     2 ms",
        "            waits for ranks 1-3  train.py:9 in main",
        "    1  101  stopped  barrier()                                          6  1 min 15 s    40 ms ━━━━━━━━",
        "    2  102  dead: killed by SIGKILL                                                 -",
        "    3    -  has not joined                                                          -",
        "    4  104  outside unisono  2 under way: barrier()                     6      250 ms      0 s",
        "            on GPUs, no. 1,234: broadcast(int64 [1])",
        "",
        " group              ranks  calls done  per second",
        " group 2            0, 1            6          12",
        " the default group  0, 2            6        idle",
        "",
        " ● rank 2 is dead",
        "",
    ]
    narrow = _picture(job, 60)
    assert all(len(line) <= 60 for line in narrow)
    assert sum(line.startswith("    ") for line in narrow) == 7

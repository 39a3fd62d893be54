"""`unisono trace` of a program on two GPUs."""

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gpu.world import NEEDS_GPU
from unisono.cli.main import app

pytestmark = [
    NEEDS_GPU,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs"),
]
PROGRAM = """
import os
import torch
import torch.distributed as dist
import unisono

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("unisono")
for count in (1000, 1000, 16 << 20):
    dist.all_reduce(torch.ones(count, device="cuda"))
torch.cuda.synchronize()
dist.destroy_process_group()
"""


def test_calls_and_kernels_have_tracks(tmp_path: Path) -> None:
    program, out = tmp_path / "program.py", tmp_path / "out"
    program.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    ran = CliRunner().invoke(app, ["trace", "--compute", "--no-bound", "-o", str(out), "--", *torchrun])
    assert ran.exit_code == 0, ran.output
    assert "on GPUs a rank issues 2 all_reduce by kernel" in " ".join(ran.stdout.split())
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    issued = [(event["pid"], event["name"]) for event in events if event.get("cat") == "on GPUs"]
    assert sorted(issued) == [
        (rank, f"all_reduce by {way}") for rank in range(2) for way in ("NCCL", "kernel", "kernel")
    ]
    streams = [event for event in events if event["name"] == "thread_name" and "GPU, stream" in event["args"]["name"]]
    assert {event["pid"] for event in streams} == {0, 1}
    assert any(event["name"].startswith("one_shot") for event in events if event.get("cat") == "kernel")

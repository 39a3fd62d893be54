"""UNISONO_REPLACES=gloo: who asks torch for Gloo gets unisono, and is told that it has Gloo."""

import os
import subprocess
import sys
from pathlib import Path

import agents

PROGRAM = """
import torch, torch.distributed as dist

def kind(group=None):
    return type(group or dist.group.WORLD).__name__

for asked in (["gloo"], []):
    dist.init_process_group(*asked)
    found = [kind(), dist.get_backend()]
    for name in asked and ("GLOO", "unisono"):
        group = dist.new_group(backend=name)
        x = torch.ones(3)
        dist.all_reduce(x, group=group)
        found += [kind(group), dist.get_backend(group), str(x[0].item())]
    dist.monitored_barrier()
    if dist.get_rank() == 0:
        print("found", *found)
    dist.destroy_process_group()
"""


def test_gloo_is_replaced_and_so_is_what_nobody_names(tmp_path: Path) -> None:
    program, printed = tmp_path / "program.py", tmp_path / "printed"
    program.write_text(PROGRAM)
    agent = agents.start(
        f"--standalone --nproc-per-node 2 {program}", printed, environment={"UNISONO_REPLACES": "gloo"}
    )
    assert agents.end(agent) == 0, printed.read_text()
    asked, unnamed = (line.split()[1:] for line in printed.read_text().splitlines() if line.startswith("found"))
    ours = ["UnisonoProcessGroup", "gloo"]
    assert asked == [*ours, *ours, "2.0", *ours, "2.0"]
    assert unnamed[:1] == ours[:1]


def test_a_name_that_can_not_be_replaced() -> None:
    changed = os.environ | {"UNISONO_REPLACES": "nccl"}
    job = subprocess.run([sys.executable, "-c", "import torch"], env=changed, capture_output=True, text=True)
    assert job.returncode == 1
    assert "UNISONO_REPLACES=nccl: only gloo can be replaced; set it to gloo, or unset it" in job.stderr

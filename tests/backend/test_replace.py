"""UNISONO_REPLACES=gloo: who asks torch for Gloo gets unisono, and is told that it has Gloo."""

import os
import subprocess
import sys
from pathlib import Path

import agents

PROGRAM = """
import sys, torch, torch.distributed as dist

def kind(group=None):
    return type(group or dist.group.WORLD).__name__

asked, *more = sys.argv[1:]
dist.init_process_group(*([asked] if asked != "nothing" else []))
found = [kind(), dist.get_backend()]
for name in more:
    group = dist.new_group(backend=name)
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    found += [kind(group), dist.get_backend(group), str(x[0].item())]
dist.monitored_barrier()
if dist.get_rank() == 0:
    print("found", *found)
dist.destroy_process_group()
"""


def found(tmp_path: Path, *arguments: str) -> list[str]:
    program, printed = tmp_path / "program.py", tmp_path / "printed"
    program.write_text(PROGRAM)
    command = f"--standalone --nproc-per-node 2 {program} {' '.join(arguments)}"
    agent = agents.start(command, printed, environment={"UNISONO_REPLACES": "gloo"})
    assert agents.end(agent) == 0, printed.read_text()
    (line,) = [line for line in printed.read_text().splitlines() if line.startswith("found")]
    return line.split()[1:]


def test_gloo_is_replaced(tmp_path: Path) -> None:
    ours = ["UnisonoProcessGroup", "gloo"]
    assert found(tmp_path, "gloo", "GLOO", "unisono") == [*ours, *ours, "2.0", *ours, "2.0"]


def test_a_default_group_without_a_name(tmp_path: Path) -> None:
    assert found(tmp_path, "nothing")[:1] == ["UnisonoProcessGroup"]


def test_a_name_that_can_not_be_replaced() -> None:
    changed = os.environ | {"UNISONO_REPLACES": "nccl"}
    job = subprocess.run([sys.executable, "-c", "import torch"], env=changed, capture_output=True, text=True)
    assert job.returncode == 1
    assert "UNISONO_REPLACES=nccl: only gloo can be replaced; set it to gloo, or unset it" in job.stderr

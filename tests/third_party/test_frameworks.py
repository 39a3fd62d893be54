"""Programs of the field's frameworks, started as users start them: with unisono they compute what Gloo gives them.

The programs (programs/) know nothing of unisono. Each writes its values, weights and the class of its group to a file.
"""

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ports import free_port

PROGRAMS = Path(__file__).parent / "programs"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "{port}")
ACCELERATE = (
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "{port}"),
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True)
class Case:
    """A program, the framework that it needs, and how it is started.

    ``named``: it names the backend itself, as its first argument; else it asks for Gloo, and ``UNISONO_REPLACES`` gives
    it unisono. ``more``: its further arguments before the file; those of the run with Gloo, if they differ.
    """

    program: str
    needs: str
    start: tuple[str, ...] = ()
    named: bool = True
    more: tuple[str, ...] = ()
    reference: tuple[str, ...] | None = None


CASES = {
    "Lightning-popen": Case("lightning_trainer", "lightning", more=("popen",)),
    "Lightning-spawn": Case("lightning_trainer", "lightning", more=("spawn",), reference=("popen",)),
    "Lightning-fork": Case("lightning_trainer", "lightning", more=("fork",), reference=("popen",)),
    # torch's SyncBatchNorm takes CPU tensors in groups of unisono alone: one rank of Gloo's has the whole batch.
    "Lightning-SyncBN": Case("lightning_sync_batchnorm", "lightning", more=("2",), reference=("1",)),
    "Fabric": Case("lightning_fabric", "lightning"),
    "torchmetrics": Case("metrics", "torchmetrics", TORCHRUN),
    "Accelerate-launch": Case("accelerate_loop", "accelerate", ACCELERATE, named=False),
    "Accelerate-notebook": Case("accelerate_notebook", "accelerate", more=("{port}",)),
    "HF-Trainer": Case("transformers_trainer", "transformers", TORCHRUN, named=False),
    "TRL": Case("trl_sft", "trl", TORCHRUN, named=False),
    "Ray-Train": Case("ray_train", "ray"),
    "DeepSpeed": Case("deepspeed_zero", "deepspeed", TORCHRUN),
    "Ignite": Case("ignite_engine", "ignite", more=("gloo", "{port}"), named=False),
}


def run(case: Case, backend: str, more: Sequence[str]) -> dict[str, Any]:
    """What the program writes."""
    with tempfile.TemporaryDirectory() as folder:
        out, port = Path(folder) / "values", str(free_port())
        words = [*case.start, str(PROGRAMS / f"{case.program}.py"), *[backend] * case.named, *more, str(out)]
        changed = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": folder}
        if backend == "unisono" and not case.named:
            changed["UNISONO_REPLACES"] = "gloo"
        command = [sys.executable, *(word.format(port=port) for word in words)]
        job = subprocess.run(command, env=changed, capture_output=True, text=True, timeout=150, cwd=folder)
        assert job.returncode == 0, f"{job.stdout[-3000:]}\n{job.stderr[-6000:]}"
        found: dict[str, Any] = torch.load(out)
    return found


@functools.cache
def by_gloo(case: Case) -> dict[str, Any]:
    return run(case, "gloo", case.reference if case.reference is not None else case.more)


def reference(case: Case) -> dict[str, Any]:
    """Gloo's values, found once for all ways to start the same program."""
    if case.reference is not None and case.program == "lightning_trainer":
        return by_gloo(CASES["Lightning-popen"])
    return by_gloo(case)


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.timeout(320)
def test_values(name: str) -> None:
    case = CASES[name]
    if importlib.util.find_spec(case.needs) is None:
        pytest.skip(f"{case.needs} is not installed: make test-frameworks installs it")
    theirs, ours = reference(case), run(case, "unisono", case.more)
    assert "Unisono" in ours["group"]
    assert "Unisono" not in theirs["group"]
    for kind in ("values", "weights"):
        torch.testing.assert_close(ours[kind], theirs[kind], rtol=1e-5, atol=1e-6)

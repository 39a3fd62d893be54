"""PyTorch's own distributed test suite on two GPUs, by tests/torch_suite/driver.py.

`expected_2_gpus.txt` there names the tests that must pass. Of those that were run the others are two that read the name
of the backend or of NCCL's events, one that lets rank 0 alone make the first call on GPUs, which is collective here,
and two that want an error of `monitored_barrier` behind a call that hangs. What NCCL does shows
``driver.py --device cuda --world-size 2 --backend nccl``.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_suite
from gpu.world import NEEDS_GPU

pytestmark = [
    NEEDS_GPU,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs"),
]
HERE = Path(torch_suite.__file__).parent
PARTS = 8  # side by side, for a test mostly starts processes


def test_passes_what_nccl_passes() -> None:
    pytest.importorskip("expecttest", reason="the suite needs expecttest")
    expected = (HERE / "expected_2_gpus.txt").read_text().split()
    command = [sys.executable, str(HERE / "driver.py"), "--device", "cuda", "--world-size", "2", "--only"]
    running = [
        subprocess.Popen([*command, *expected[k::PARTS]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for k in range(PARTS)
    ]
    try:
        found = "".join(process.communicate(timeout=500)[0] for process in running)
    finally:
        for process in running:
            process.kill()
    passed = {line.removeprefix("passed ") for line in found.splitlines() if line.startswith("passed ")}
    assert not set(expected) - passed, found[-20000:]

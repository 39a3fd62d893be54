"""PyTorch's own distributed test suite passes on unisono wherever it passes on Gloo.

`expected_3.txt` and `expected_4.txt` name the tests that must pass at 3 and 4 ranks: everything Gloo passes but
`CANNOT`, and the all-to-all tests on lists of uneven tensors, which Gloo refuses. To see what Gloo does:
`python tests/torch_suite/driver.py --backend gloo --world-size 3`.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from ranks import BACKEND, RankFailure, ranks

HERE = Path(__file__).parent

CANNOT = {
    "test_monitored_barrier_failure_order": "dist.monitored_barrier refuses every backend not called gloo",
    "test_monitored_barrier_gloo": "the same",
    "test_monitored_barrier_gloo_subgroup": "the same",
    "test_monitored_barrier_wait_all_ranks": "the same",
    "test_monitored_barrier_gloo_rank_0_timeout": "wants 0 s to run out at once, in Gloo's words",
}
"""Tests that pass on Gloo and are left out because they cannot pass on another backend, with the reason."""


class Suite:
    """One run of the driver in the background."""

    def __init__(self, world_size: int, directory: Path) -> None:
        self.out, self.err = directory / f"out_{world_size}", directory / f"err_{world_size}"
        command = [sys.executable, str(HERE / "driver.py"), "--backend", BACKEND, "--world-size", str(world_size)]
        command += ["--leave-out", *CANNOT]
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)

    def outcomes(self) -> dict[str, set[str]]:
        """Wait for the end; return the names of the tests that "passed", "failed" and were "skipped"."""
        assert self.process.wait() == 0, self.err.read_text()[-4000:]
        outcomes: dict[str, set[str]] = {"passed": set(), "failed": set(), "skipped": set()}
        for line in self.out.read_text().splitlines():
            outcome, _, rest = line.partition(" ")
            if outcome in outcomes:
                outcomes[outcome].add(rest.split(":")[0])
        return outcomes

    def kill(self) -> None:
        """End the driver and its ranks, if they still run."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Suite]]:
    """Both sizes at once: the suite mostly waits, for timeouts it provokes and for processes to start."""
    with ExitStack() as stack:
        running = {}
        for world_size in (3, 4):
            running[world_size] = Suite(world_size, tmp_path_factory.mktemp("torch_suite"))
            stack.callback(running[world_size].kill)
        yield running


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [3, 4])
def test_passes_what_gloo_passes(suites: dict[int, Suite], world_size: int) -> None:
    outcomes = suites[world_size].outcomes()
    expected = set((HERE / f"expected_{world_size}.txt").read_text().split())
    missing = expected - outcomes["passed"]
    assert not missing, f"{sorted(missing)} did not pass:\n{suites[world_size].err.read_text()[-20000:]}"


def call_monitored_barrier(rank: int, world_size: int) -> None:
    dist.monitored_barrier()


def test_monitored_barrier_is_still_refused_by_name() -> None:
    with pytest.raises(RankFailure, match="only implemented for GLOO"):
        ranks(2).run(call_monitored_barrier)

"""PyTorch's own suite, run by driver.py in the background."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ranks import BACKEND

HERE = Path(__file__).parent

CANNOT = {
    "test_monitored_barrier_failure_order": "dist.monitored_barrier refuses every backend not called gloo",
    "test_monitored_barrier_gloo": "the same",
    "test_monitored_barrier_gloo_subgroup": "the same",
    "test_monitored_barrier_wait_all_ranks": "the same",
    "test_monitored_barrier_gloo_rank_0_timeout": "wants 0 s to run out at once, in Gloo's words",
}
"""Tests that pass on Gloo and are left out because they cannot pass on another backend, with the reason."""


def expected(world_size: int) -> set[str]:
    """The names of the tests that must pass with so many ranks."""
    return set((HERE / f"expected_{world_size}.txt").read_text().split())


RUNS: dict[str, tuple[int, set[str]]] = {
    "3 ranks": (3, set()),
    "4 ranks": (4, set()),
    "what takes 4 ranks": (4, expected(4) - expected(3)),
}
"""Numbers of ranks, and the tests that are run on them, if not all."""


class Suite:
    """One run of the driver in the background, of all tests or of some."""

    def __init__(self, world_size: int, only: Iterable[str] = ()) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="torch-suite-")
        directory = Path(self._directory.name)
        self.out, self.err = directory / f"out_{world_size}", directory / f"err_{world_size}"
        command = [sys.executable, str(HERE / "driver.py"), "--backend", BACKEND, "--world-size", str(world_size)]
        command = ["nice", "-n", "15", *command, "--leave-out", *CANNOT]  # behind the tests of the foreground
        command += ["--only", *sorted(only)] if only else []
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
        self._directory.cleanup()

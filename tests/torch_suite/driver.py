"""Runs torch.testing._internal.distributed.distributed_test, the suite inside the torch wheel, on a backend of choice.

    python tests/torch_suite/driver.py --backend unisono --world-size 3
    python tests/torch_suite/driver.py --backend gloo --world-size 4 --only test_broadcast
    python tests/torch_suite/driver.py --device cuda --world-size 2

The suite decides by the *name* of the backend what to run, so a backend with a new name is shown a third of it. The
driver therefore tells the suite that it runs on gloo (``BACKEND=gloo``), on GPUs on nccl, initialises every group with
the backend asked for, and opens what the suite reserves for the name of MPI or for eight ranks. It changes the suite
only; the backend is not touched. Ranks are forked from this process instead of spawned, which is ten times faster; on
GPUs, which the suite asks for when it is imported, from a server that has imported torch.

Standard output has one line per test, ``passed NAME``, ``failed NAME`` or ``skipped NAME: REASON``; the tracebacks of
failed tests go to standard error. Exit code 0 whatever the tests gave: the caller compares the lines.
"""

from __future__ import annotations

import argparse
import functools
import gc
import multiprocessing
import multiprocessing.connection
import os
import re
import sys
import tempfile
import time
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from ranks import be_on_host

RESERVED_BY_NAME = ("Only MPI supports CPU all_to_all_single", "Only MPI supports all_to_all")
"""Reasons of the suite's skips that ask for another backend's name although the operation is everybody's."""

ABOUT_THE_NAME = ("test_get_backend",)
"""Tests that compare the group's backend name with the suite's ``BACKEND``: these are told the real name."""

POLL_SECONDS = 0.01
"""How often ranks look at each other's files in the suite's own barrier (the suite: 0.1 s, a third of its time)."""


class Report(unittest.TestResult):
    """Prints each outcome as soon as it is known."""

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self._say("passed", test)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._say("skipped", test, f": {reason}")

    def addFailure(self, test: unittest.TestCase, err: object) -> None:
        super().addFailure(test, err)  # type: ignore[arg-type]
        self._say("failed", test)
        sys.stderr.write(self.failures[-1][1])

    def addError(self, test: unittest.TestCase, err: object) -> None:
        super().addError(test, err)  # type: ignore[arg-type]
        self._say("failed", test)
        sys.stderr.write(self.errors[-1][1])

    def _say(self, outcome: str, test: unittest.TestCase, rest: str = "") -> None:
        print(outcome, test.id().rsplit(".", 1)[-1] + rest.replace("\n", " "), flush=True)


NAMED = {"cpu": "gloo", "cuda": "nccl"}
"""The backend that the suite is told of, by the device of its tensors."""


def prepare_environment(world_size: int, scratch: str, device: str) -> None:
    """Sets what the suite reads when it is imported."""
    os.environ.update(
        BACKEND=NAMED[device],
        WORLD_SIZE=str(world_size),
        TEMP_DIR=scratch,
        INIT_METHOD=f"file://{scratch}/second_init",
        GLOO_SOCKET_IFNAME="lo",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="60",
        OMP_NUM_THREADS="1",
    )
    os.mkdir(os.path.join(scratch, "barrier"))


def open_gates(gpus: int) -> None:
    """Replaces the suite's skip decorators, before it is imported and applies them."""
    from torch.testing._internal import common_distributed, common_utils

    skip_if = common_utils.skip_but_pass_in_sandcastle_if

    def skip_unless_reserved(condition: bool, reason: str) -> Callable[[object], object]:
        return skip_if(condition and reason not in RESERVED_BY_NAME, reason)

    def skip_gpus(count: int, **_: object) -> Callable[[object], object]:
        return skip_if(count > gpus, f"needs {count} GPUs")

    for module in (common_utils, common_distributed):
        module.skip_but_pass_in_sandcastle_if = skip_unless_reserved
    # The originals start the ranks first and skip inside them: the same result for 0.3 s a test.
    common_distributed.skip_if_lt_x_gpu = skip_gpus
    common_distributed.skip_if_no_gpu = skip_if(not gpus, "needs GPUs")
    if int(os.environ["WORLD_SIZE"]) > 2:
        common_distributed.skip_if_small_worldsize = lambda test: test


def use_backend(suite: types.ModuleType, named: str, backend: str) -> None:
    """Lets every group that the suite would make on the backend ``named`` be made on ``backend``."""
    import torch.distributed as dist

    def routed(make: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(make)
        def with_backend(*args: object, **kwargs: object) -> object:
            if kwargs.get("backend") == named:
                kwargs["backend"] = backend
            return make(*args, **kwargs)

        return with_backend

    dist.init_process_group = routed(dist.init_process_group)
    dist.new_group = routed(dist.new_group)

    def sleep(seconds: float) -> None:
        time.sleep(POLL_SECONDS if seconds == 0.1 else seconds)

    suite.time = types.SimpleNamespace(time=time.time, sleep=sleep)


def rank_process(device: str, backend: str, **started: Any) -> Any:
    """A process to be started for a rank; ``started``: what the suite would give it."""
    if device == "cpu":
        return multiprocessing.get_context("fork").Process(**started)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch._dynamo", "torch.distributed", "unisono.backend.device_group"])
    started |= {"target": be_rank, "args": (dict(os.environ), device, backend, started["args"])}
    return server.Process(**started)


def be_rank(environment: dict[str, str], device: str, backend: str, given: tuple[Any, ...], **more: Any) -> None:
    """Runs a test as one rank, in a process that has not imported the suite."""
    os.environ.update(environment)
    case: Any = test_class(device, backend)
    case._run(*given, **more)


def test_class(device: str, backend: str) -> type[unittest.TestCase]:
    """The suite's test case, with processes of `rank_process`; imports the suite."""
    import torch

    torch.set_num_threads(1)
    open_gates(torch.cuda.device_count() if device == "cuda" else 0)
    from torch.testing._internal.distributed import distributed_test as suite

    if backend == "unisono":  # loaded with the first group: here once, not in every rank of every test
        import unisono.backend.device_group
        import unisono.backend.process_group  # noqa: F401
    use_backend(suite, NAMED[device], backend)

    class DistributedSuite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(functools.partial(rank_process, device, backend))

        def _join_processes(self, test: Callable[[], None]) -> None:
            # The original polls every 0.1 s; wait for the first failure or the last exit, then let it judge.
            running = {process.sentinel: process for process in self.processes}
            while running:
                ended = multiprocessing.connection.wait(list(running), timeout=60)
                if not ended or any(running.pop(sentinel).exitcode for sentinel in ended):
                    break
            super()._join_processes(test)

        @classmethod
        def _run(cls, rank: int, test_name: str, file_name: str, pipe: object, **kwargs: object) -> None:
            if test_name in ABOUT_THE_NAME:
                suite.BACKEND = backend
            be_on_host(rank)
            super()._run(rank, test_name, file_name, pipe, **kwargs)

    return DistributedSuite


def cases(case: type[unittest.TestCase], options: argparse.Namespace) -> Iterator[unittest.TestCase]:
    """The tests to run, in order of name."""
    for name in unittest.defaultTestLoader.getTestCaseNames(case):
        wanted = not options.only or name in options.only
        if wanted and name not in options.leave_out and re.match(options.match, name):
            yield case(name)


def main() -> None:
    """Runs the suite as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="unisono")
    parser.add_argument("--world-size", type=int, default=3)
    parser.add_argument("--device", choices=NAMED, default="cpu")
    parser.add_argument("--only", nargs="*", default=[], help="names of tests; default: all")
    parser.add_argument("--match", default="", help="names of tests: a regular expression for their beginning")
    parser.add_argument("--leave-out", nargs="*", default=[], help="names of tests")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        prepare_environment(options.world_size, scratch, options.device)
        case = test_class(options.device, options.backend)
        gc.freeze()
        unittest.TestSuite(cases(case, options)).run(Report())


if __name__ == "__main__":
    main()

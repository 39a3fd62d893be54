"""torchrun, forked from the server that has imported torch already. Its ranks are programs of their own, as always.

agent = start("--standalone --nproc-per-node 2 script.py", tmp_path / "printed")
assert end(agent) == 0
"""

import os
import shlex
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from hangs.job import end_with_parent
from ranks import FORKS

__all__ = ["end", "start"]


def start(
    command: str,
    printed: Path,
    prepare: Callable[[], None] | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> ForkServerProcess:
    """Starts torchrun with a command line; it and its ranks write to ``printed``, errors too.

    ``prepare`` is called in the agent before it starts its ranks.
    """
    changed = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
    agent = FORKS.Process(target=_be, args=(shlex.split(command), printed, prepare, changed, folder or Path.cwd()))
    agent.start()
    return agent


def end(agent: ForkServerProcess, seconds: float = 100.0) -> int | None:
    """Waits for the end of torchrun, ends it with its ranks if it does not come, and returns its exit code."""
    agent.join(seconds)
    agent.terminate()
    agent.join(30)
    return agent.exitcode


def _be(
    command: list[str], printed: Path, prepare: Callable[[], None] | None, environment: Mapping[str, str], folder: Path
) -> None:
    from torch.distributed.run import main

    end_with_parent()
    with open(printed, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if prepare is not None:
        prepare()
    main(command)

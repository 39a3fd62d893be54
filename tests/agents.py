"""torchrun and other Python programs, forked from the server that has imported torch already.

agent = start("--standalone --nproc-per-node 2 script.py", tmp_path / "printed")
assert end(agent) == 0

The ranks of torchrun are forked from it as well: programs with a `__main__`, arguments, environment, session and exit
of their own, as those started by exec, but without the imports. Where the environment has what is read when torch is
imported they are started by exec.
"""

import atexit
import gc
import importlib.util
import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from hangs.job import end_with_parent
from ranks import FORKS

__all__ = ["ForkedProgram", "end", "python", "start"]

READ_AT_IMPORT = ("UNISONO_REPLACES", "UNISONO_TRACE")


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
    return _fork(_be_torchrun, (shlex.split(command), prepare), printed, environment, folder)


def python(
    command: Sequence[str], printed: Path, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> ForkServerProcess:
    """Starts a Python program: a file, or ``-m`` and a module, and its arguments.

    The programs that it starts by subprocess, and processes of multiprocessing's fork server, are forked from it.
    """
    return _fork(_be_program, (list(command),), printed, environment, folder)


def end(process: ForkServerProcess, seconds: float = 100.0) -> int | None:
    """Waits for the end of torchrun, ends it with its ranks if it does not come, and returns its exit code."""
    process.join(seconds)
    process.terminate()
    process.join(30)
    return process.exitcode


def _fork(
    target: Callable[..., None],
    arguments: tuple[Any, ...],
    printed: Path,
    environment: Mapping[str, str] | None,
    folder: Path | None,
) -> ForkServerProcess:
    changed = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
    process = FORKS.Process(target=_be, args=(printed, changed, folder or Path.cwd(), target, arguments))
    process.start()
    return process


def _be(
    printed: Path, environment: Mapping[str, str], folder: Path, target: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    end_with_parent()
    gc.freeze()
    with open(printed, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    target(*arguments)


def _be_torchrun(command: list[str], prepare: Callable[[], None] | None) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.run import main

    subprocess_handler.Popen = ForkedProgram
    if prepare is not None:
        prepare()
    main(command)


def _be_program(command: list[str]) -> None:
    def context(method: str | None = None) -> Any:
        return known("fork" if method == "forkserver" else method)

    known, multiprocessing.get_context = multiprocessing.get_context, context  # type: ignore[assignment]
    subprocess.Popen = ForkedProgram  # type: ignore[misc]
    _run(command)


class ForkedProgram(subprocess.Popen[Any]):
    """A Python program that is forked from this process, where subprocess would start the interpreter anew."""

    def _execute_child(
        self, args: Sequence[str], executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any,
        env: Mapping[str, str] | None, *rest: Any,
    ) -> None:  # fmt: skip
        command = [argument for argument in args[1:] if argument != "-u"]
        seen = os.environ if env is None else env
        ready = args[0] == sys.executable and not any(name in seen for name in READ_AT_IMPORT)
        if not ready or preexec_fn or pass_fds or cwd or command[0] == "-c":
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )
            return
        _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_, start_new_session, _ = rest
        self.pid = os.fork()
        if self.pid == 0:
            for stream, end in enumerate((p2cread, c2pwrite, errwrite)):
                if end != -1:
                    os.dup2(end, stream)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            if start_new_session:
                os.setsid()
            os.environ.clear()
            os.environ.update(seen)
            _run(command)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _run(command: list[str]) -> None:
    """Be the program until its end, as the interpreter does that has been started for it."""
    status = 0
    try:
        _forget_parent()
        _main(command)
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if leaving.code is not None and not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


def _main(command: list[str]) -> None:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *sys.path]
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    spec = importlib.util.spec_from_file_location("__main__", command[0])
    assert spec is not None
    assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
    module.__file__ = command[0]
    exec(spec.loader.get_code("__main__"), vars(module))


def _forget_parent() -> None:
    """What a new interpreter does not know: the signal handlers of this one, and whose child it is."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    process = multiprocessing.process
    (main,) = (kind for kind in process.BaseProcess.__subclasses__() if kind.__name__ == "_MainProcess")
    process._current_process, process._parent_process = main(), None  # type: ignore[attr-defined]
    process._children = set()  # type: ignore[attr-defined]
    multiprocessing.forkserver._forkserver.__init__()  # type: ignore[attr-defined, misc]
    multiprocessing.resource_tracker._resource_tracker.__init__()  # type: ignore[misc]

"""The traced program as a process: its exit code, and the signals that are meant for it. Never imports torch."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from unisono.errors import file_errors
from unisono.launch import ends_handled

__all__ = ["Program", "terminable"]


class Program:
    """The traced program, which is told of a signal that ends this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._signal = 0

    def run(self, command: list[str], environment: dict[str, str]) -> int:
        """The exit code; after Ctrl-C, which reaches the program too, that of an interrupt."""
        with file_errors(f"run {command[0]}"):
            self._process = subprocess.Popen(command, env=environment)
        if self._signal:
            self._process.send_signal(self._signal)
        while True:
            try:
                code = self._process.wait()
                break
            except KeyboardInterrupt:
                continue
        return code if code >= 0 else 128 - code

    def terminate(self, number: int, frame: FrameType | None) -> None:
        """Pass the signal on; once the program has ended, end this process through its `finally` clauses."""
        self._signal = number
        if self._process is not None:
            if self._process.returncode is not None:
                raise SystemExit(128 + number)
            self._process.send_signal(number)


@contextmanager
def terminable() -> Iterator[Program]:
    """A program to run; SIGTERM and SIGHUP reach it meanwhile, and afterwards end this process as `sys.exit` does."""
    program = Program()
    with ends_handled(program.terminate):
        yield program

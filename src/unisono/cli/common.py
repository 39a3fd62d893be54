"""Helpers of all commands: text in and out, files, and the place of a process among those that torchrun has started."""

import os
import sys
import textwrap
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, TextIO

from rich.console import Console, RenderableType

from unisono.errors import UsageError, file_errors

__all__ = [
    "FOUND_EXIT",
    "INTERRUPT_EXIT",
    "USAGE_EXIT",
    "check_writable",
    "echo",
    "echo_words",
    "is_terminal",
    "listed",
    "read_source",
    "show",
    "source_name",
    "write",
]

FOUND_EXIT, USAGE_EXIT, INTERRUPT_EXIT = 1, 2, 130
"""Exit codes: what was looked for is wrong, or not there; the command line is; Ctrl-C."""


def listed(text: str) -> list[str]:
    """The names in a list by comma."""
    return [name.strip() for name in text.split(",") if name.strip()]


def is_terminal(stream: TextIO | None) -> bool:
    """True if somebody looks at the stream; a closed one is None."""
    return stream is not None and stream.isatty()


def check_writable(path: Path | None, what: str = "") -> None:
    """Raise UsageError for a place where no file can be written, before any time is spent on what goes into it.

    ``what`` names the file in the message: ``the plot``; None: nothing is to be written.
    """
    if path is None:
        return
    named = f"{what} {path}".lstrip()
    if path.is_dir():
        raise UsageError(f"cannot write {named}: it is a directory, expected a file name")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {named}: the directory {path.parent} does not exist")
    with file_errors(f"write {named}"):
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink(missing_ok=True)  # the ranks of torchrun check it side by side


def source_name(source: str) -> str:
    """The name of a source of text in messages."""
    return "standard input" if source == "-" else source


def read_source(source: str) -> str:
    """The text in a file, or on standard input (`-`). Raises UsageError if it cannot be read."""
    if source == "-" and sys.stdin is None:
        raise UsageError("cannot read standard input: it is closed")
    try:
        with file_errors(f"read {source_name(source)}"):
            return sys.stdin.buffer.read().decode() if source == "-" else Path(source).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{source_name(source)} is not text (UTF-8): expected a schedule") from None


def echo(text: str) -> None:
    """Write to standard output, with `?` for what its encoding lacks.

    A reader that has gone (`| head`) is no error: the rest of the output has no taker. Raises OSError for a device
    that is full.
    """
    if sys.stdout is None:  # it was closed before Python began
        return
    encoding = sys.stdout.encoding or "utf-8"
    known = text.encode(encoding, "replace").decode(encoding)
    try:
        sys.stdout.write(known if known.endswith("\n") else f"{known}\n")
        sys.stdout.flush()
    except OSError as problem:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(problem, BrokenPipeError):
            raise


def echo_words(text: str) -> None:
    """Write lines of words as `echo` does, broken between words where a terminal is narrower."""
    width = get_terminal_size().columns if is_terminal(sys.stdout) else 0
    for line in text.splitlines() if width else [text]:
        start = line[: len(line) - len(line.lstrip("# "))]  # of a comment, or of a line that is set in
        fits = not width or len(line) <= width
        echo(line if fits else textwrap.fill(line, width, subsequent_indent=f"{start}  ", break_on_hyphens=False))


def write(path: Path, content: str) -> None:
    """Write a file, UTF-8, and say so; `-` is standard output. Raises UsageError if it cannot be written."""
    if str(path) == "-":
        echo(content)
        return
    with file_errors(f"write {path}"):
        path.write_text(content, encoding="utf-8")
    echo(f"wrote {path}")


def show(console: Console, content: RenderableType, **how: Any) -> None:
    """Print with rich, in colour where the terminal has it, as `echo` does."""
    with console.capture() as captured:
        console.print(content, **how)
    echo("\n".join(line.rstrip() for line in captured.get().splitlines()))

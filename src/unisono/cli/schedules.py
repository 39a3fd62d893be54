"""What commands about schedules share: where a schedule comes from, and where text goes."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from unisono.algorithms import build, names
from unisono.errors import UsageError
from unisono.schedule import Schedule

__all__ = ["find_schedule", "read_source", "say", "show", "write"]

_COLLECTIVE, _RANKS = "all_reduce", 4


def find_schedule(
    source: str, collective: str | None, ranks: int | None, root: int | None, chunks: int | None
) -> Schedule:
    """The schedule of an algorithm by name, or the one in a file (`-`: standard input) in its text form or JSON.

    Raises UsageError if there is no such algorithm or file, if its content is no schedule, or if a file comes together
    with arguments that only an algorithm has.
    """
    if source != "-" and source in names():
        return build(
            source,
            collective or _COLLECTIVE,
            _RANKS if ranks is None else ranks,
            root or 0,
            1 if chunks is None else chunks,
        )
    given = {"COLLECTIVE": collective, "--ranks": ranks, "--root": root, "--chunks": chunks}
    extra = [name for name, value in given.items() if value is not None]
    if source != "-" and not Path(source).exists():
        raise UsageError(
            f"no algorithm and no file is called {source!r}: the algorithms are {', '.join(names())}; "
            "a file holds a schedule as `unisono draw ring --text` prints it"
        )
    if extra:
        raise UsageError(f"the schedule in {_called(source)} has its own collective and numbers: leave {extra[0]} out")
    return _parse(read_source(source), _called(source))


def _called(source: str) -> str:
    return "standard input" if source == "-" else source


def read_source(source: str) -> str:
    """The text in a file, or on standard input (`-`). Raises UsageError if it cannot be read."""
    try:
        return sys.stdin.buffer.read().decode() if source == "-" else Path(source).read_text(encoding="utf-8")
    except OSError as problem:
        raise UsageError(f"cannot read {_called(source)}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{_called(source)} is not text (UTF-8): expected a schedule") from None


def _parse(content: str, called: str) -> Schedule:
    try:
        return (
            Schedule.from_json(json.loads(content)) if content.lstrip().startswith("{") else Schedule.from_text(content)
        )
    except UsageError as problem:
        raise UsageError(f"{called}: {problem}") from None
    except (ValueError, OverflowError) as problem:
        raise UsageError(f"{called} cannot be read as a schedule: {problem}") from None


def say(text: str) -> None:
    """Write to standard output, with `?` for what its encoding lacks.

    A reader that has gone (`| head`) is no error: the rest of the output has no taker.
    """
    encoding = sys.stdout.encoding or "utf-8"
    known = text.encode(encoding, "replace").decode(encoding)
    try:
        sys.stdout.write(known if known.endswith("\n") else f"{known}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write(path: Path, content: str) -> None:
    """Write a file, UTF-8, and say so; `-` is standard output. Raises UsageError if it cannot be written."""
    if str(path) == "-":
        say(content)
        return
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as problem:
        raise UsageError(f"cannot write {path}: {problem.strerror}") from None
    say(f"wrote {path}")


def show(console: Console, content: RenderableType, **how: Any) -> None:
    """Print with rich, in colour where the terminal has it, as `say` does."""
    with console.capture() as captured:
        console.print(content, **how)
    say("\n".join(line.rstrip() for line in captured.get().splitlines()))

"""What commands about schedules share: where a schedule comes from, and where text goes."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from unisono.algorithms import build, names
from unisono.cli.programs import Placed, find_default, place_default
from unisono.errors import UsageError
from unisono.program import Program
from unisono.schedule import Schedule

__all__ = [
    "DEFAULT",
    "RANKS",
    "find_placed",
    "find_schedule",
    "is_name",
    "parse_programs",
    "parse_schedule",
    "read_file",
    "read_source",
    "say",
    "show",
    "write",
]

DEFAULT = "default"
"""In place of an algorithm: the one that runs if none is asked for."""
_COLLECTIVE, RANKS = "all_reduce", 4


def find_placed(
    source: str, collective: str | None, ranks: int | None, root: int | None, chunks: int | None, nbytes: int
) -> list[Placed]:
    """The schedule as `find_schedule` has it, as the backend places it; ``default`` is the one for this size.

    For ``default``, what runs between shared tensors comes after it. Raises UsageError as `find_schedule` does, and if
    ``default`` comes with a number of chunks.
    """
    if source != DEFAULT:
        return [Placed(find_schedule(source, collective, ranks, root, chunks))]
    if chunks is not None:
        raise UsageError("the table of defaults has its own number of chunks: leave --chunks out")
    count = RANKS if ranks is None else ranks
    row = find_default(collective or _COLLECTIVE, nbytes, count)
    return place_default(row, nbytes, count, root or 0)


def find_schedule(
    source: str, collective: str | None, ranks: int | None, root: int | None, chunks: int | None
) -> Schedule:
    """The schedule of an algorithm by name, or the one in a file (`-`: standard input) in its text form or JSON.

    Raises UsageError if there is no such algorithm or file, if its content is no schedule, or if a file comes together
    with arguments that only an algorithm has.
    """
    if not is_name(source):
        return parse_schedule(read_file(source, collective, ranks, root, chunks), source)
    return build(
        source,
        collective or _COLLECTIVE,
        RANKS if ranks is None else ranks,
        root or 0,
        1 if chunks is None else chunks,
    )


def is_name(source: str) -> bool:
    """Whether a source is an algorithm, or the default, rather than a file."""
    return source != "-" and (source == DEFAULT or source in names())


def read_file(source: str, collective: str | None, ranks: int | None, root: int | None, chunks: int | None) -> str:
    """The content of a file, or standard input. Raises UsageError as `find_schedule` does."""
    given = {"COLLECTIVE": collective, "--ranks": ranks, "--root": root, "--chunks": chunks}
    extra = [name for name, value in given.items() if value is not None]
    if source != "-" and not Path(source).exists():
        raise UsageError(
            f"no algorithm and no file is called {source!r}: the algorithms are {', '.join(names())}; "
            "a file holds a schedule as `unisono draw ring --text` prints it"
        )
    if extra:
        raise UsageError(f"the schedule in {_called(source)} has its own collective and numbers: leave {extra[0]} out")
    return read_source(source)


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


def parse_schedule(content: str, source: str) -> Schedule:
    """The schedule that the content of a file describes. Raises UsageError that names the file."""
    called = _called(source)
    try:
        return (
            Schedule.from_json(json.loads(content)) if content.lstrip().startswith("{") else Schedule.from_text(content)
        )
    except UsageError as problem:
        raise UsageError(f"{called}: {problem}") from None
    except (ValueError, OverflowError) as problem:
        raise UsageError(f"{called} cannot be read as a schedule: {problem}") from None


def parse_programs(content: str, source: str) -> list[Program]:
    """The programs in a text, each after a line that begins with ``program``. Raises UsageError that names the file."""
    texts = [f"program {text}" for text in re.split(r"^program\s", content, flags=re.MULTILINE)[1:]]
    try:
        return [Program.from_text(text) for text in texts]
    except UsageError as problem:
        raise UsageError(f"{_called(source)}: {problem}") from None


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

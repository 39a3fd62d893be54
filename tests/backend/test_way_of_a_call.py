"""The way of a call is short enough to be read, and CONTRIBUTING.md's map of it is right."""

import ast
import inspect
import os
import re
import sys
from pathlib import Path
from types import CodeType, FrameType
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import unisono
from ranks import ranks

SOURCE = Path(unisono.__file__).parent
MAP = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("**Every call:**")[2]
ROWS = re.findall(r"^\|(.*?)\|(.*?)\|.*?\| (\d+) \|$", MAP.partition("**The first call")[0], re.MULTILINE)
LIMIT, NAMED = 600, 20  # lines: of a way; of a function from which on the map names it


def lines_of(file: str, name: str) -> int:
    """Of a function, its decorators included."""
    for node in ast.walk(ast.parse((SOURCE / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == name.rpartition(".")[2] and node.end_lineno:
            return node.end_lineno - min(part.lineno for part in (node, *node.decorator_list)) + 1
    return 0


def rows() -> list[tuple[list[str], list[str], int]]:
    """The map: files, functions, lines; of a row without a file it is that of the row before."""
    found: list[tuple[list[str], list[str], int]] = []
    for where, what, lines in ROWS:
        files = re.findall(r"`([\w/]+\.py)`", where) or found[-1][0]
        folder = files[0].rpartition("/")[0]
        files = [file if "/" in file else f"{folder}/{file}" for file in files]
        found.append((files, re.findall(r"`([\w.]+)`", what), int(lines)))
    return found


@pytest.mark.parametrize(("files", "names", "lines"), rows())
def test_the_map_counts_right(files: list[str], names: list[str], lines: int) -> None:
    whole = len((SOURCE / files[0]).read_text(encoding="utf-8").splitlines()) if not names else 0
    assert sum(max(lines_of(file, name) for file in files) for name in names) + whole == lines


def enters(rank: int, world_size: int, meeting: str, numel: int) -> list[tuple[str, str, int]]:
    """The functions that a prepared all_reduce enters, without numba: file, name of the outermost, lines.

    Of several calls those of the shortest way, on which no rank was late.
    """
    x, ways = torch.ones(numel), list[set[CodeType]]()
    with patch.dict(os.environ, UNISONO_FUSED="0"):
        dist.init_process_group("unisono", f"file://{meeting}", rank=rank, world_size=world_size)
        dist.all_reduce(x)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            ways[-1].add(frame.f_code)

    for _ in range(30):
        ways.append(set())
        sys.setprofile(note)
        dist.all_reduce(x)
        sys.setprofile(None)
    dist.destroy_process_group()
    return [
        (
            str(Path(code.co_filename).relative_to(SOURCE)),
            code.co_qualname.partition(".<locals>")[0].rpartition(".")[2],
            len(inspect.getsourcelines(code)[0]),
        )
        for code in min(ways, key=len)
    ]


@pytest.mark.parametrize("nbytes", [4, 1 << 20])
def test_what_a_call_enters_is_short_and_on_the_map(nbytes: int, tmp_path: Path) -> None:
    """In torch's operations: compiled loops are made from the same functions."""
    found, _ = ranks(2, group=False).run(enters, str(tmp_path / "meeting"), nbytes // 4)
    assert 300 < sum(lines for _, _, lines in found) < LIMIT
    names = {name.rpartition(".")[2] for _, names, _ in rows() for name in names}
    missing = {(file, name) for file, name, lines in found if lines >= NAMED and name not in names}
    assert {name for file, name in missing if file != "runtime/zero_copy.py"} == set()  # the text below names that

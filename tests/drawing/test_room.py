"""Drawing looks at the rooms before it only, and never at torch or the command line."""

import ast
from pathlib import Path

import unisono.drawing

ALLOWED = tuple(f"unisono.{room}" for room in ("drawing", "errors", "program", "schedule", "simulation", "units"))


def test_imports_point_to_earlier_rooms() -> None:
    files = list(Path(unisono.drawing.__file__).parent.glob("*.py"))
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] not in ("torch", "typer"), (file.name, name)
                assert not name.startswith("unisono") or name.startswith(ALLOWED), (file.name, name)


def test_the_public_names_are_there() -> None:
    assert all(hasattr(unisono.drawing, name) for name in unisono.drawing.__all__)

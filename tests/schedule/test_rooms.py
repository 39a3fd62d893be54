"""The data room needs numpy and nothing else, and looks only at rooms before it."""

import ast
from pathlib import Path

import pytest

import unisono.errors

SOURCE = Path(unisono.errors.__file__).parent
ALLOWED = {
    "schedule": {"unisono.errors", "unisono.schedule"},
    "algorithms": {"unisono.errors", "unisono.schedule", "unisono.algorithms"},
    "verify.py": {"unisono.errors", "unisono.schedule"},
}


def _imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_point_to_earlier_rooms_and_never_to_torch(room: str) -> None:
    files = sorted((SOURCE / room).rglob("*.py")) if (SOURCE / room).is_dir() else [SOURCE / room]
    assert files
    for file in files:
        for name in _imports(file):
            assert name.split(".")[0] not in ("torch", "rich", "typer"), (file.name, name)
            if name.startswith("unisono"):
                assert any(name == room_ or name.startswith(f"{room_}.") for room_ in ALLOWED[room]), (file.name, name)

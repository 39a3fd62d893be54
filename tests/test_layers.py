"""The shape of the house: rooms import only from earlier rooms, files and functions stay small, names are exported."""

import ast
from pathlib import Path

import pytest

import unisono

SOURCE = Path(unisono.__file__).parent
ROOMS = [
    ["errors", "units"],
    ["schedule"],
    ["algorithms"],
    ["program"],
    ["verify", "simulate", "draw", "select", "measured", "advice"],
    ["transport", "torch_names"],
    ["watch"],
    ["run"],
    ["backend", "tune"],
    ["parallel"],
    ["train"],
    ["bench"],
    ["trace"],
    ["cli"],
]
ORDER = {name: number for number, room in enumerate(ROOMS) for name in room}
NO_TORCH = {name for name, number in ORDER.items() if number < ORDER["transport"]}
FILES = sorted(SOURCE.rglob("*.py"))


def short(file: Path) -> str:
    return str(file.relative_to(SOURCE))


def room_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(file: Path) -> list[str]:
    """Absolute names of everything a file imports, inside functions too."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_every_room_has_its_place() -> None:
    rooms = {room_of(file) for file in FILES} - {"__init__"}
    assert rooms == ORDER.keys()


@pytest.mark.parametrize("file", [f for f in FILES if room_of(f) != "__init__"], ids=short)
def test_imports_point_to_earlier_rooms(file: Path) -> None:
    room = room_of(file)
    for name in imports(file):
        parts = name.split(".")
        if parts[0] == "unisono" and len(parts) > 1 and parts[1] in ORDER:
            same = parts[1] == room
            assert same or ORDER[parts[1]] < ORDER[room] or ROOMS[ORDER[room]] == ROOMS[ORDER[parts[1]]], name
        if room in NO_TORCH:
            assert parts[0] != "torch", f"{file} imports {name}: {room} never imports torch"


@pytest.mark.parametrize("file", FILES, ids=short)
def test_files_and_functions_are_small(file: Path) -> None:
    text = file.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{file}: {node.name} is too long"


def test_public_names() -> None:
    visible = {name for name in vars(unisono) if not name.startswith("_")}
    modules = {file.stem for file in FILES} | {path.name for path in SOURCE.iterdir()} | {"os", "sys", "register"}
    assert visible - modules <= set(unisono.__all__)
    assert all(hasattr(unisono, name) for name in unisono.__all__)

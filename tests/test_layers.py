"""The shape of the house: rooms import only from earlier rooms, files and functions stay small, names are exported."""

import ast
from pathlib import Path

import unisono

SOURCE = Path(unisono.__file__).parent
ROOMS = [
    ["errors", "units"],
    ["schedule"],
    ["algorithms"],
    ["program"],
    ["verify", "simulate", "draw", "select", "measured", "advice"],
    ["transport", "torch_names"],
    ["run"],
    ["watch"],
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


def unconditional(file: Path) -> list[str]:
    """The rooms that are imported with a file."""
    names = [node.module or "" for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)]
    return [name.split(".")[1] if "." in name else "backend" for name in names if name.startswith("unisono")]


PACKAGE = max(ORDER[room] for room in unconditional(SOURCE / "__init__.py"))
"""`import unisono` imports up to here: who does so is in a later room."""


def test_the_package_ends_with_the_backend() -> None:
    assert ORDER["backend"] == PACKAGE


def test_every_room_has_its_place() -> None:
    rooms = {room_of(file) for file in FILES} - {"__init__"}
    assert rooms == ORDER.keys()


def stray(file: Path) -> list[str]:
    """What a file imports and should not."""
    room, found = room_of(file), []
    for name in imports(file):
        parts = name.split(".")
        if parts[0] == "unisono":  # by itself, or one of its own names
            order = ORDER.get(parts[1] if len(parts) > 1 else "", PACKAGE)
            if order > ORDER[room]:
                found.append(f"{short(file)} imports {name}, of a later room")
        if room in NO_TORCH and parts[0] == "torch":
            found.append(f"{short(file)} imports {name}: {room} never imports torch")
    return found


def test_imports_point_to_earlier_rooms() -> None:
    assert [line for file in FILES if room_of(file) != "__init__" for line in stray(file)] == []


def large(file: Path) -> list[str]:
    """What is too long in a file, or the file itself."""
    text = file.read_text()
    lines = text.count("\n")
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    long = [f"{short(file)}: {name} has {length} lines" for name, length in lengths.items() if length > 60]
    return [*long, *([f"{short(file)} has {lines} lines"] if lines > 400 else [])]


def test_files_and_functions_are_small() -> None:
    assert [line for file in FILES for line in large(file)] == []


def test_public_names() -> None:
    visible = {name for name in vars(unisono) if not name.startswith("_")}
    modules = {file.stem for file in FILES} | {path.name for path in SOURCE.iterdir()} | {"os", "sys", "register"}
    assert visible - modules <= set(unisono.__all__)
    assert all(hasattr(unisono, name) for name in unisono.__all__)

"""The shape of the house: rooms import only from earlier rooms, files and functions stay small, names are exported."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import unisono

SOURCE = Path(unisono.__file__).parent
ROOMS = [
    ["errors", "units"],
    ["schedule"],
    ["algorithms"],
    ["program"],
    ["verification"],
    ["simulation"],
    ["drawing", "selection"],
    ["transport", "torch_names"],
    ["runtime", "launch", "gpu"],
    ["watch"],
    ["backend"],
    ["parallel"],
    ["weights"],
    ["train"],
    ["bench", "tune", "topo"],
    ["trace", "doctor"],
    ["cli"],
    ["front door"],
]
ORDER = {name: number for number, room in enumerate(ROOMS) for name in room}
NO_TORCH = {name for name, number in ORDER.items() if number < ORDER["transport"]}
FILES = sorted(SOURCE.rglob("*.py"))


def short(file: Path) -> str:
    return str(file.relative_to(SOURCE))


def room_of(file: Path) -> str:
    """Its folder, or the name of a file that is a room by itself; the package's own file is the front door."""
    return file.relative_to(SOURCE).parts[0].removesuffix(".py").replace("__init__", "front door")


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
    assert {room_of(file) for file in FILES} == ORDER.keys()


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
    assert [line for file in FILES for line in stray(file)] == []


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


LIGHT = {"unisono", "unisono.backend", "unisono.backend.patches", "unisono.backend.register", "unisono.errors"}
HEAVY = ("torch", "numpy", "rich", "typer", "numba", "matplotlib")


def loaded_by(code: str) -> set[str]:
    """The modules in a new process that has run this code."""
    program = f"{code}\nimport sys\nprint(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    )


def test_importing_the_package_loads_nothing_but_the_front_door() -> None:
    loaded = loaded_by("import unisono")
    assert {name for name in loaded if name.startswith("unisono")} == LIGHT
    assert not loaded & set(HEAVY)


def test_schedules_load_no_torch() -> None:
    verbs = "build, verify, simulate, draw, select, Schedule, Step, Transfer, Topology, register_algorithm"
    loaded = loaded_by(f"from unisono import {verbs}; str(draw(build('ring', 'all_reduce', 4)))")
    assert "torch" not in loaded
    later = {room for room in ORDER if ORDER[room] >= ORDER["transport"]} - {"backend", "front door"}
    assert {name.split(".")[1] for name in loaded if name.startswith("unisono.")}.isdisjoint(later)


def test_public_names() -> None:
    assert dir(unisono) == sorted(unisono.__all__)
    assert all(hasattr(unisono, name) for name in unisono.__all__)
    with pytest.raises(AttributeError, match="module 'unisono' has no attribute 'verfy'"):
        _ = unisono.verfy


def test_no_module_has_the_name_of_a_public_name() -> None:
    """Importing unisono.x would put the module in the place of what `from unisono import x` gives."""
    assert {path.stem for path in SOURCE.iterdir()}.isdisjoint(unisono.__all__)
    for file in FILES:
        if room_of(file) != "front door" and file.stem not in ("__main__", "loaded"):
            import_module(".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"))
    assert not [name for name in unisono.__all__ if isinstance(getattr(unisono, name), ModuleType)]

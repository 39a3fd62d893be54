"""The room's own rule: torch.distributed's public interface, and nothing of unisono that a backend needs."""

import ast
import re
from pathlib import Path

import pytest

import unisono.parallel

FILES = sorted((Path(unisono.__file__).parent / "parallel").rglob("*.py"))
ALLOWED = {
    "errors", "torch_names", "units", "schedule", "algorithms", "verification", "simulation", "drawing", "parallel",
}  # fmt: skip


def modules(file: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(str(node.module))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_imports_no_backend_and_nothing_private_of_torch_distributed(file: Path) -> None:
    for name in modules(file):
        parts = name.split(".")
        if parts[0] == "unisono" and len(parts) > 1:
            assert parts[1] in ALLOWED, f"{file.name} imports {name}"
        if parts[:2] == ["torch", "distributed"]:
            assert not any(part.startswith("_") for part in parts), f"{file.name} imports {name}"


def test_every_file_says_what_torch_lacks() -> None:
    ours = [file for file in FILES if file.name != "__init__.py"]
    lines = {str(file.name): (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0] for file in ours}
    assert [name for name, first in lines.items() if not re.search(r"torch|DTensor", first)] == []


FOLDERS = sorted(path.parent for path in FILES[0].parent.glob("*/__init__.py"))


def test_a_folder_lists_what_it_exports_and_the_room_lists_its_folders() -> None:
    assert sorted(folder.name for folder in FOLDERS) == unisono.parallel.__all__
    for name in unisono.parallel.__all__:
        folder = getattr(unisono.parallel, name)
        assert folder.__all__ == sorted(folder.__all__, key=lambda word: (not word[0].isupper(), word))
        assert all(hasattr(folder, word) for word in folder.__all__)
    with pytest.raises(AttributeError, match="no attribute 'server': it has data, expert, mesh"):
        unisono.parallel.server  # noqa: B018


def test_a_public_name_has_one_path() -> None:
    names = [word for name in unisono.parallel.__all__ for word in getattr(unisono.parallel, name).__all__]
    assert len(names) == len(set(names))
    assert "DataParallel" not in names

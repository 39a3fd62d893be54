"""The room's own rule: torch.distributed's public interface, and nothing of unisono that a backend needs."""

import ast
from pathlib import Path

import pytest

import unisono

FILES = sorted((Path(unisono.__file__).parent / "parallel").rglob("*.py"))
ALLOWED = {"errors", "torch_names", "units", "schedule", "draw", "simulate", "parallel"}


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

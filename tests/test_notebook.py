"""The notebook runs from top to bottom, in a kernel where one is installed (unisono[notebook]), else by exec."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "schedules.ipynb"


def _cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_cells_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for number, cell in enumerate(_cells()):
        exec(compile(cell, f"cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert "lost: chunk 0: the contribution of ranks 0, 2, 3 is missing at " in printed
    assert "best: " in printed


def test_a_kernel_shows_the_drawings() -> None:
    why = "needs the extra unisono[notebook]; the cells have run by exec above"
    pytest.importorskip("ipykernel", reason=why)
    nbclient, nbformat = (pytest.importorskip(name, reason=why) for name in ("nbclient", "nbformat"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=100).execute()
    shown = [set(output.get("data", ())) for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/svg+xml" in kinds for kinds in shown) == 3
    assert sum("text/html" in kinds for kinds in shown) == 2


def test_it_is_kept_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)

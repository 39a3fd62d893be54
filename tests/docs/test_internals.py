"""docs/internals.md shows what its script draws, and names files that exist."""

import re
import runpy

import pytest

import unisono
from docs.blocks import ROOT

PAGE = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
DRAWN = runpy.run_path(str(ROOT / "docs" / "img" / "internals.py"))["PICTURES"]


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_are_as_drawn(name: str) -> None:
    """After a change: python docs/img/internals.py."""
    assert (ROOT / "docs" / "img" / f"{name}.svg").read_text(encoding="utf-8") == DRAWN[name]()
    assert f"(img/{name}.svg)" in PAGE


def test_files_exist() -> None:
    source = ROOT / "src" / unisono.__name__
    named = set(re.findall(r"`(\w+/\w+\.py)`", PAGE))
    assert named
    assert [name for name in sorted(named) if not (source / name).is_file()] == []

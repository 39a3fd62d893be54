"""CONTRIBUTING's vocabulary: no identifier and no file name of the source has a word of the column *Never*."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import unisono

SOURCE = Path(unisono.__file__).parent
TABLE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def split(name: str) -> list[str]:
    """The words of a name: ``_peerMappings2`` has peer and mappings."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def forbidden(text: str) -> list[list[str]]:
    """The names in backticks of the table's last column, each as its words."""
    table = text.partition("## Vocabulary")[2].partition("\n## ")[0]
    cells = [line.rstrip("| ").rpartition("|")[2] for line in table.splitlines() if line.startswith("|")]
    return [split(name) for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def names(text: str) -> Iterator[str]:
    """Every name that a file defines, imports, reads or passes."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.alias(name=name, asname=other):
                yield from (*name.split("."), other or "")


def found(name: str, never: list[list[str]]) -> list[str]:
    """The forbidden words that a name has, side by side."""
    words = split(name)
    return [
        "_".join(each)
        for each in never
        if each[0] in words and any(words[at : at + len(each)] == each for at in range(len(words) - len(each) + 1))
    ]


def test_the_table_is_read() -> None:
    rows = "| Use | For | Never |\n| --- | --- | --- |\n| `a` | b | c; `d`, `EfGh` (for `i`) |"
    text = f"## Vocabulary\n\n{rows}\n\n## Layers\n| `j` |"
    assert forbidden(text) == [["d"], ["ef", "gh"], ["i"]]
    assert len(forbidden(TABLE.read_text())) > 30


def test_words_are_whole() -> None:
    assert found("at_Lane_2", [["lane"]]) == ["lane"]
    assert found("PlaneAt", [["lane"]]) == []
    assert found("_lastWords_of", [["last", "words"], ["words", "last"]]) == ["last_words"]


def test_no_name_has_a_word_of_the_never_column() -> None:
    never = forbidden(TABLE.read_text())
    where = {
        name: file.relative_to(SOURCE)
        for file in sorted(SOURCE.rglob("*.py"))
        for name in (*names(file.read_text()), file.stem, file.parent.name)
    }
    assert [f"{file}: {name} has {word}" for name, file in where.items() for word in found(name, never)] == []

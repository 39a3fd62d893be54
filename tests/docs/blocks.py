"""The code of the pages: fenced and indented blocks, with the marker above them, if any.

<!-- not run: needs two hosts -->      the block below is not run, for this reason
<!-- ranks: 8 -->                      the Python below runs on so many ranks (else 2, where it needs ranks)
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt  # which rich brings

__all__ = ["PAGES", "ROOT", "Block", "blocks"]

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"([A-Z_]+=\S* )*(unisono|torchrun|make|pip|python|accelerate) ")
MARKER = re.compile(r"<!-- (not run|ranks): (.+) -->\n*")


@dataclass(frozen=True)
class Block:
    """One block; ``kind`` is python, commands or text; ``why`` is the reason for which it is not run."""

    page: str
    line: int
    section: str
    kind: str
    text: str
    ranks: int = 2
    why: str = ""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """The command lines, without prompts and comments."""
        lines = self.text.splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [re.sub(r"\s+# .*", "", line).strip() for line in lines]


def _kind(language: str, text: str) -> str:
    if language == "python":
        return "python"
    prompted = re.search(r"^\$ ", text, re.MULTILINE)
    return "commands" if prompted or COMMAND.match(text + " ") else "text"


def blocks(page: str) -> Iterator[Block]:
    """All blocks of a page, in order."""
    section, marker = "", None
    tokens = MarkdownIt().parse((ROOT / page).read_text(encoding="utf-8"))
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and following is not None:
            section = following.content
        if token.type == "html_block":
            marker = MARKER.fullmatch(token.content)
        elif token.type in ("fence", "code_block"):
            assert token.map is not None
            what, value = marker.groups() if marker else ("", "")
            kind, line = _kind(token.info, token.content), token.map[0] + 1
            ranks, why = (int(value), "") if what == "ranks" else (2, value)
            yield Block(page, line, section, kind, token.content, ranks, why)
            marker = None
        elif token.level == 0:
            marker = None

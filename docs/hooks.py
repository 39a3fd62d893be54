"""What the documentation site shows beside the pages of this folder: mkdocs runs these hooks (mkdocs.yml).

README, CONTRIBUTING, CHANGELOG, the examples and the records of the benchmarks become pages as they are; the API
reference has a page per public module, with what its ``__all__`` names. Links between files of the repository, as they
are followed where it is browsed, become links between pages.
"""

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FENCED = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
PATTERNS = ("*.py", "*.ipynb", "*/*.md")
ABOUT = "{members: false, show_root_heading: false, show_root_toc_entry: false}"

_pages: dict[str, str] = {}
"""The file of the repository that each page was made of, by the page's path."""


def public_modules() -> list[str]:
    """The modules that users import from; each has a page of the reference."""
    below = import_module("unisono.parallel").__all__
    return ["unisono.errors", "unisono", *(f"unisono.parallel.{name}" for name in below), "unisono.weights"]


def reference() -> Iterator[tuple[str, str]]:
    """Path and Markdown of each page of the API reference; what two modules export is on the first one's page."""
    seen: set[int] = set()
    rows: dict[str, str] = {}
    for name in public_modules():
        module = import_module(name)
        names = [one for one in module.__all__ if not one.startswith("__")]
        own = [one for one in names if id(getattr(module, one)) not in seen]
        seen.update(id(getattr(module, one)) for one in own)
        if not own:
            continue
        page = f"{name}.md"
        rows[name] = f"| [`{name}`]({page}) | {', '.join(f'[`{one}`]({page}#{name}.{one})' for one in own)} |"
        about = f"# {name}\n\n::: {name}\n    options: {ABOUT}\n"
        yield f"api/{page}", "\n".join([about, *(f"::: {name}.{one}\n" for one in own)])
    contents = ["# API", "", "| import from | names |", "| --- | --- |", *(rows[name] for name in sorted(rows))]
    yield "api/index.md", "\n".join([*contents, ""])


def _notebook(text: str) -> str:
    cells = json.loads(text)["cells"]
    shown = ((cell["cell_type"], "".join(cell["source"])) for cell in cells)
    return "\n\n".join(source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in shown) + "\n"


def copies() -> Iterator[tuple[str, str, str]]:
    """Path of a page, the file of the repository that it is made of, and its Markdown."""
    for name in ("README", "CONTRIBUTING", "CHANGELOG"):
        page = "index.md" if name == "README" else f"{name.lower()}.md"
        yield page, f"{name}.md", (ROOT / f"{name}.md").read_text(encoding="utf-8")
    for kind in ("examples", "benchmarks"):
        contents = [f"# {'Examples' if kind == 'examples' else 'Records of the benchmarks'}\n"]
        for file in sorted(file for pattern in PATTERNS for file in (ROOT / kind).glob(pattern)):
            text, path = file.read_text(encoding="utf-8"), file.relative_to(ROOT)
            name = path.parent.name if file.suffix == ".md" else path.stem
            if file.suffix == ".py":
                text = f"# {path.name}\n\n```python\n{text}```\n"
            elif file.suffix == ".ipynb":
                text = _notebook(text)
            contents.append(f"* [{name}]({name}.md)")
            yield f"{kind}/{name}.md", path.as_posix(), text
        yield f"{kind}/index.md", f"{kind}/README.md", "\n".join([*contents, ""])


def _section(folder: str, pages: Iterable[str]) -> list[Any]:
    """The pages of a folder for the navigation; its index first, without a name of its own."""
    named = sorted(PurePosixPath(page).stem for page in pages if page.startswith(f"{folder}/"))
    return [f"{folder}/index.md", *({name: f"{folder}/{name}.md"} for name in named if name != "index")]


def on_config(config: Any) -> Any:
    """Spells the folders of the navigation out."""
    pages = [page for page, *_ in [*copies(), *reference()]]
    config.nav = [
        {title: _section(what.rstrip("/"), pages)} if isinstance(what, str) and what.endswith("/") else {title: what}
        for entry in config.nav
        for title, what in entry.items()
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made of other files, and the data that the records link to."""
    from mkdocs.structure.files import File

    _pages.clear()
    _pages.update({file.src_uri: f"docs/{file.src_uri}" for file in files})
    for page, made_of, text in copies():
        files.append(File.generated(config, page, content=text))
        _pages[page] = made_of
    for page, text in reference():
        files.append(File.generated(config, page, content=text))
        _pages[page] = f"docs/{page}"
    for data in sorted((ROOT / "benchmarks").glob("*/*.json")):
        path = data.relative_to(ROOT).as_posix()
        files.append(File.generated(config, path, abs_src_path=str(data)))
        _pages[path] = path
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links between files of the repository become links between pages."""
    made_of = _pages[page.file.src_uri]
    page_of = {file: path for path, file in _pages.items()}
    here = PurePosixPath(page.file.src_uri).parent

    def moved(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(made_of), link[2]))
        path = page_of.get(target)
        return f"{link[1]}{os.path.relpath(path, here) if path else link[2]}{link[3]}"

    parts, at = [], 0
    for block in FENCED.finditer(markdown):
        parts += [LINK.sub(moved, markdown[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, LINK.sub(moved, markdown[at:])])


def on_post_build(config: Any) -> None:
    """Warns of public names that the reference does not show; `mkdocs build --strict` ends with an error then."""
    shown = "".join(page.read_text(encoding="utf-8") for page in Path(config.site_dir, "api").rglob("*.html"))
    names = {name for _, text in reference() for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)}
    if missing := sorted(name for name in names if f'id="{name}"' not in shown):
        logging.getLogger("mkdocs.hooks").warning("not in the API reference: %s", ", ".join(missing))

"""The API reference has every public name, each with a docstring, and links lead somewhere."""

import inspect
import re
import runpy
from importlib import import_module
from pathlib import PurePosixPath

from docs.blocks import PAGES, ROOT

HOOKS = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
PLACES = dict(HOOKS["reference"]())
SHOWN = [name for text in PLACES.values() for name in re.findall(r"^::: (\S+)\n\n?$", text, re.MULTILINE)]


def public() -> dict[str, object]:
    """Every public name, by the module that exports it."""
    modules = [import_module(name) for name in HOOKS["public_modules"]()]
    names = ((module, name) for module in modules for name in module.__all__ if not name.startswith("__"))
    return {f"{module.__name__}.{name}": getattr(module, name) for module, name in names}


def test_every_public_name_is_in_the_reference() -> None:
    shown = {id(getattr(import_module(path.rpartition(".")[0]), path.rpartition(".")[2])) for path in SHOWN}
    assert [name for name, value in public().items() if id(value) not in shown] == []
    assert len(SHOWN) == len(set(SHOWN))


def test_the_modules_are_those_that_users_import_from() -> None:
    used = set()
    for page in PAGES:
        used |= set(re.findall(r"from (unisono(?:\.parallel\.\w+)?) import", (ROOT / page).read_text(encoding="utf-8")))
    assert {"unisono", "unisono.errors"} <= set(HOOKS["public_modules"]())
    assert used <= set(HOOKS["public_modules"]())


def test_every_public_name_says_what_it_is() -> None:
    functions = {name: value for name, value in public().items() if inspect.isroutine(value) or inspect.isclass(value)}
    assert [name for name, value in functions.items() if not inspect.getdoc(value)] == []


def test_links_lead_to_files() -> None:
    """Those within the site are held by mkdocs (make docs); these are followed where the repository is browsed."""
    dead = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
        targets = re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", text)
        folder = ROOT / PurePosixPath(page).parent
        dead += [f"{page}: {target}" for target in targets if not (folder / target).exists()]
    assert dead == []

"""Every command line on the pages runs, and prints what the page shows below it.

What measures or trains does so with few and small sizes. After a wanted change, UPDATE_GOLDEN=1 writes the pages'
outputs and pictures anew; look at the diff before committing.
"""

import importlib.util
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import agents
from docs.blocks import PAGES, ROOT, Block, blocks
from test_examples import EXAMPLES, STARTERS
from unisono.algorithms import registry
from unisono.cli.main import app

BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [block for block in BLOCKS if block.kind == "commands" and not block.why]
OUTPUT = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
SHORT = {
    "bench": ["--bytes", "8", "--seconds", "0.001", "--runs", "1", "--no-check"],
    "bench weights": ["--tensors", "4x30", "--replicas", "1", "--reshard", "1:1", "--runs", "1"],
    "train": ["--steps", "1", "--layers", "2", "--width", "16", "--context", "16", "--batch", "16"],
    "tune": ["--bytes", "8"],
}
"""What makes short what would take long."""
TRAIN = """
import os
import torch, torch.distributed as dist

dist.init_process_group(os.environ.get("UNISONO_REPLACES", "unisono"))
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""
"""A program of the reader's: train.py."""


def _unisono(words: list[str], given: str | None = None) -> str:
    """In this process, whose ranks are forked from the server that all tests share."""
    if words[:2] != ["bench", "compare"]:
        words = [*words, *SHORT.get(" ".join(words[:2]), SHORT.get(words[0], ()))]
    if words[0] == "train" and not {"--ranks", "--dp"} & {*words}:
        words = [*words, "--ranks", "2"]
    if words[0] == "trace":
        command = shlex.join(words[1:]).replace(
            "--nproc-per-node 4", "--nproc-per-node 2 --run-path --start-method fork"
        )
        words = ["trace", "--no-bound", *shlex.split(command)]
    ran = CliRunner().invoke(app, words, input=given, env={"COLUMNS": "80"})
    right = (0, 1) if words[0] == "verify" else (0,)  # pages show wrong schedules too
    assert ran.exit_code in right, f"{shlex.join(words)}\n{ran.output}"
    return ran.stdout


def _sed(words: list[str], given: str | None) -> str:
    _, pattern, replacement, _ = words[0].split("/")
    assert given is not None
    assert pattern in given
    return given.replace(pattern, replacement)


def _torchrun(words: list[str], environment: dict[str, str]) -> str:
    """The examples have a test of their own (tests/test_examples.py); what else is started runs on two ranks."""
    if file := next((word.removeprefix("examples/") for word in words if word.startswith("examples/")), ""):
        backend = environment.get("BACKEND", "unisono")
        assert any((e.file, f"{e.world_size}") == (file, words[1]) and backend in e.backends for e in EXAMPLES)
        return ""
    if "train" in words:
        words = [*words, *SHORT["train"]]
    number = 1 if "UNISONO_REPLACES" in environment else 2  # which starts them by exec
    command = shlex.join(words).replace("--nproc-per-node 4", f"--standalone --nproc-per-node {number}")
    agent = agents.start(command, Path("printed"), environment=environment)
    assert agents.end(agent) == 0, Path("printed").read_text()
    return ""


def _make(words: list[str]) -> str:
    assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    return ""


def _python(words: list[str]) -> str:
    """The examples that start their processes have a test of their own too."""
    if file := words[0].removeprefix("examples/") if words[0] != "-m" else "":
        assert (file, tuple(words[1:])) in {(file, arguments) for file, _, _, arguments in STARTERS}
        return ""
    assert importlib.util.find_spec(words[1]), words
    return ""


def _run(command: str) -> str:
    """What a command line prints, a pipeline too."""
    text: str | None = None
    for part in command.split(" | "):
        words = shlex.split(part)
        environment = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        program, *words = words[len(environment) :]
        how: dict[str, Callable[[], str]] = {
            "unisono": lambda words=words, given=text: _unisono(words, given),
            "sed": lambda words=words, given=text: _sed(words, given),
            "torchrun": lambda words=words, environment=environment: _torchrun(words, environment),
            "make": lambda words=words: _make(words),
            "python": lambda words=words: _python(words),
        }
        text = how[program]()
    return str(text)


def _update(block: Block, command: str, shown: str, printed: str) -> None:
    path = ROOT / block.page
    page = path.read_text(encoding="utf-8")
    path.write_text(page.replace(f"$ {command}\n{shown}```", f"$ {command}\n{printed}```"), encoding="utf-8")


@pytest.mark.parametrize("block", COMMANDS, ids=[block.name for block in COMMANDS])
def test_commands_run_and_print_what_the_page_shows(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = bool(os.environ.get("UPDATE_GOLDEN"))
    images = tmp_path / "docs" / "img"
    images.mkdir(parents=True)
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    registry.list_algorithms()  # loads them
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    for before in BLOCKS:  # what the page has added to the algorithms, or saved
        lasting = re.search(r"^@register_algorithm|^\w+\.save\(", before.text, re.MULTILINE)
        if before.page == block.page and before.kind == "python" and lasting:
            exec(compile(before.text, before.name, "exec"), {"__name__": "page"})
    shown = dict(OUTPUT.findall(block.text))
    for command in block.commands():
        if command.startswith("..."):  # what the reader does meanwhile
            continue
        printed = _run(command)
        if shown.get(command):
            if update:
                _update(block, command, shown[command], printed)
            else:
                assert shown[command] == printed
    for drawn in images.iterdir():
        kept = ROOT / "docs" / "img" / drawn.name
        if update:
            kept.write_text(drawn.read_text(encoding="utf-8"), encoding="utf-8")
        assert kept.read_text(encoding="utf-8") == drawn.read_text(encoding="utf-8")


def test_every_picture_of_the_schedules_is_drawn_by_a_command() -> None:
    page = "docs/schedules.md"
    shown = set(re.findall(r"\]\((img/[^)]*)\)", (ROOT / page).read_text(encoding="utf-8")))
    words = [word for block in COMMANDS if block.page == page for line in block.commands() for word in line.split()]
    assert shown == {word.removeprefix("docs/") for word in words if word.startswith("docs/img")}
    assert len(shown) >= 3


def test_extras_that_pages_install_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for page in PAGES for name in re.findall(r"unisono\[(\w+)\]", (ROOT / page).read_text())}
    assert named
    assert named <= set(extras)


def test_few_blocks_are_not_run() -> None:
    """Each with its reason: a marker in the Markdown above it."""
    marked = [block for block in BLOCKS if block.why]
    assert len(marked) <= 12, [block.name for block in marked]
    assert all(len(block.why.split()) >= 3 for block in marked)

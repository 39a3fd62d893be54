"""The Python of every page runs: what needs ranks on those of the pool, the rest here, a page after the other."""

import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from docs.blocks import PAGES, ROOT, Block, blocks
from docs.given import given
from ports import free_port
from ranks import ranks
from unisono.algorithms import registry

NEEDS_RANKS = re.compile(r"\bdist\.|\brank ==|unisono\.parallel")
PYTHON = [block for page in PAGES for block in blocks(page) if block.kind == "python" and not block.why]
ALONE = [block for block in PYTHON if not NEEDS_RANKS.search(block.text)]
TOGETHER = [block for block in PYTHON if block not in ALONE]
JOBS = sorted({(block.page, block.ranks) for block in TOGETHER})


@pytest.mark.parametrize("page", sorted({block.page for block in ALONE}))
def test_what_needs_no_ranks(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In order; what a comment says is printed is printed."""
    monkeypatch.chdir(tmp_path)
    registry.list_algorithms()  # loads them
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    for block in ALONE:
        if block.page == page:
            exec(compile(block.text, block.name, "exec"), {"__name__": "page"})
            printed = capsys.readouterr().out
            for promised in re.findall(r"# (\[tensor.*)", block.text):
                assert promised in printed


def on_ranks_run(rank: int, world_size: int, these: list[Block], ports: list[int], folder: str) -> None:
    """Each block in names of its own, in a group of unisono unless it makes one."""
    import torch.distributed as dist

    before, handler, path = dict(os.environ), signal.getsignal(signal.SIGTERM), list(sys.path)
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{world_size}", "MASTER_ADDR": "127.0.0.1"}
    sys.path.append(str(ROOT / "examples"))
    try:
        with contextlib.chdir(folder), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            for block, port in zip(these, ports, strict=True):
                os.environ["MASTER_PORT"] = f"{port}"
                if "init_process_group" not in block.text:
                    dist.init_process_group("unisono")
                exec(compile(block.text, block.name, "exec"), given(block.section, rank, world_size))
                if dist.is_initialized():
                    dist.barrier()  # the store is rank 0's, and the others may be making a group
                    dist.destroy_process_group()
    finally:
        os.environ.clear()
        os.environ.update(before)
        signal.signal(signal.SIGTERM, handler)
        sys.path[:] = path


@pytest.mark.parametrize(("page", "world_size"), JOBS, ids=[f"{page}-{number}" for page, number in JOBS])
def test_what_needs_ranks(page: str, world_size: int, tmp_path: Path) -> None:
    these = [block for block in TOGETHER if (block.page, block.ranks) == (page, world_size)]
    ports = [free_port() for _ in these]
    ranks(world_size, group=False).run(on_ranks_run, these, ports, str(tmp_path))


def test_there_is_python_on_the_pages_that_are_about_it() -> None:
    assert {block.page for block in PYTHON} >= {"README.md", "docs/backend.md", "docs/parallel.md", "docs/schedules.md"}

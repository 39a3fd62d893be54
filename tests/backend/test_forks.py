"""Processes forked before, during and after a group: they make groups of their own, drop what they inherit, or end."""

import datetime
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import agents
from backend.test_leaving import held
from ports import free_port
from ranks import BACKEND, ranks

LIMIT = datetime.timedelta(seconds=20)


def start(rank: int, world_size: int, port: int) -> None:
    dist.init_process_group(
        BACKEND, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size, timeout=LIMIT
    )


def calls(group: Any = None) -> None:
    size = dist.get_world_size(group)
    for numel in (3, 1 << 19):
        x, y = torch.ones(numel), torch.ones(numel)
        dist.all_reduce(x, group=group)
        dist.all_reduce(y, group=group, async_op=True).wait()
        assert x.sum() == y.sum() == numel * size


def lives(rank: int, world_size: int, port: int) -> None:
    """A group's whole life."""
    start(rank, world_size, port)
    calls()
    calls(dist.new_group(list(range(world_size))))
    dist.barrier()
    dist.destroy_process_group()


def anew() -> None:
    """A group of the child's own, after what it has inherited is dropped."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    lives(0, 1, free_port())


def workers() -> None:
    """Ranks forked from here, each other's peers, as notebooks start them."""
    if dist.is_initialized():
        dist.destroy_process_group()
    mp.start_processes(lives, (2, free_port()), nprocs=2, start_method="fork")


def forked(body: Callable[[], object]) -> int:
    """Runs ``body`` in a forked child, which then ends at once."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        mp.current_process().daemon = False  # the ranks of tests are, and might start no processes
        try:
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def before_and_after(rank: int, world_size: int) -> list[int]:
    codes = [ended(forked(anew))]
    for _ in range(3):
        lives(rank, world_size, free_port())
        codes += [ended(forked(anew)), ended(forked(workers))]
    return codes


def test_groups_before_and_after() -> None:
    assert ranks(1, group=False).run(before_and_after) == [[0] * 7]


def during(
    rank: int, world_size: int, ports: list[int], body: Callable[[], object]
) -> tuple[list[int], dict[str, int]]:
    """The children come and go while the parent's calls are under way; what the parent then keeps of its group."""
    lives(rank, world_size, ports[0])
    ended(forked(lambda: None))  # where there are shared tensors, a pipe to the last child stays until the next fork
    before = held()
    start(rank, world_size, ports[1])
    group = dist.new_group(list(range(world_size)))
    calls(group)
    x = torch.ones(1 << 18)
    work = dist.all_reduce(x, async_op=True)
    codes = [ended(forked(body)) for _ in range(2)]
    work.wait()
    assert x.sum() == world_size * (1 << 18)
    calls(group)
    calls()
    dist.barrier()
    dist.destroy_process_group()
    return codes, dict(held() - before)


def grandchildren() -> None:
    assert ended(forked(anew)) == 0
    anew()
    assert ended(forked(anew)) == 0
    workers()


def drops() -> None:
    dist.destroy_process_group()
    gc.collect()


@pytest.mark.parametrize("body", [anew, workers, grandchildren, drops], ids=lambda body: body.__name__)
@pytest.mark.parametrize("size", [1, 2])
def test_the_group_of_the_parent_goes_on(size: int, body: Callable[[], object]) -> None:
    assert ranks(size, group=False).run(during, [free_port(), free_port()], body) == [([0, 0], {})] * size


def in_context(rank: int, world_size: int) -> list[int | None]:
    """multiprocessing's own processes, forked from another thread, that end in one way or another."""
    context, codes = mp.get_context("fork"), []
    start(rank, world_size, free_port())
    calls()
    mp.current_process().daemon = False  # which might start no processes

    def run() -> None:
        for target, arguments in ((anew, ()), (sys.exit, (3,)), (os._exit, (4,)), (calls, ())):
            process = context.Process(target=target, args=arguments)
            process.start()
            process.join(60)
            codes.append(process.exitcode)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    mp.current_process().daemon = True
    calls()
    dist.destroy_process_group()
    return codes


def test_processes_of_multiprocessing() -> None:
    assert ranks(1, group=False).run(in_context) == [[0, 3, 4, 1]]  # the last calls in its parent's group


def on_one_port(rank: int, world_size: int, port: int) -> int:
    start(rank, world_size, port)
    calls()
    begun, begins = os.pipe()
    child = forked(lambda: os.write(begins, b"!") and time.sleep(60))
    os.read(begun, 1)  # the child has closed what it does not keep
    dist.destroy_process_group()
    lives(rank, world_size, port)
    os.kill(child, signal.SIGKILL)
    return ended(child)


def test_a_child_does_not_keep_its_parent_s_port() -> None:
    assert ranks(1, group=False).run(on_one_port, free_port()) == [-signal.SIGKILL]


ENDS = """
import gc, os, sys, torch, torch.distributed as dist
dist.init_process_group("unisono", init_method="tcp://127.0.0.1:{port}", rank=0, world_size=1)
group, x = dist.new_group([0]), torch.ones(3)
store = group.get_group_store()
dist.all_reduce(x, group=group)
ends, codes = ("falls off", "sys.exit", "os._exit", "exception", "drops"), []
for gone, end in [(gone, end) for gone in (False, True) for end in ends]:
    if gone and dist.is_initialized():
        dist.all_reduce(x, group=group)
        dist.destroy_process_group()
    child = os.fork()
    if child == 0:
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    print(codes, flush=True)
    sys.exit()
if end == "sys.exit":
    sys.exit(3)
if end == "os._exit":
    os._exit(4)
if end == "exception":
    raise KeyError("the child's")
if end == "drops":
    if not gone:
        dist.destroy_process_group()
    del group, store
    gc.collect()
"""


def test_a_child_ends_while_the_group_is_there_and_after(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ENDS.format(port=free_port()))
    found = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=100)
    assert (found.returncode, found.stdout) == (0, f"{[0, 3, 4, 1, 0] * 2}\n"), found.stderr


UNGUARDED = """
import multiprocessing, sys, torch.distributed as dist

dist.init_process_group("unisono", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
child = multiprocessing.get_context("spawn").Process(target=print)
child.start()
child.join()
dist.barrier()
print("the child ended with", child.exitcode)
"""


def test_a_program_without_a_guard_is_told_so_by_the_process_that_it_spawns(tmp_path: Path) -> None:
    program, printed = tmp_path / "program.py", tmp_path / "printed"
    program.write_text(UNGUARDED)
    assert agents.end(agents.python([str(program), str(tmp_path / "meeting")], printed)) == 0
    text = printed.read_text()
    assert "UsageError: rank 0: init_process_group is called while multiprocessing imports the main module" in text
    assert 'under if __name__ == "__main__":' in text
    assert "the child ended with 1" in text

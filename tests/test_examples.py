"""Every example runs and prints what it promises. A new one is a row of the table below."""

import contextlib
import importlib.util
import io
import os
import re
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

import agents
from ports import free_port
from ranks import ranks
from unisono.transport import host as hosts

FOLDER = Path(__file__).parent.parent / "examples"
BACKENDS = ("unisono", "gloo")


class Example(NamedTuple):
    """A file under examples/, the ranks it is for, and patterns that rank 0 must print, in this order."""

    file: str
    world_size: int
    prints: tuple[str, ...]
    backends: tuple[str, ...] = BACKENDS
    arguments: tuple[str, ...] = ()


EXAMPLES = [
    Example("01_data_parallel_by_hand.py", 2, (r"step 20: loss 0\.\d+", r"step 60: loss 0\.0\d+", "bit for bit")),
    Example("02_ddp.py", 2, (r"torch's DDP and ours differ by (0e\+00|\de-0[789])", "rank 0: 8 batches, 8 steps")),
    Example(
        "03_tensor_parallel.py",
        2,
        (
            r"step 30: in one process (1\.\d{3})\d+, split \1\d",
            r"rank 0 holds 15 of 29 rows; embeddings differ by \de-0[678]",
        ),
    ),
    Example(
        "04_pipeline.py",
        2,
        ("rank 1: 1F0 2F0", r"first loss (\d\.\d{5})\d, of one process \1", r"steps: 0\.", "zb-v: bubble .* predicted"),
        arguments=("zb-v",),
    ),
    Example(
        "05_operator_split.py",
        2,
        ("rank 0 holds seq1 layer1 layer2", "pipeline 0BW0 +10 times", "border 1 to 0", r"differ by (\de-0[5-9]|0e)"),
    ),
    *(
        Example(
            "06_three_dimensions.py",
            world_size,
            (
                rf"{shape}: rank 0 holds layers \[0, 1\], \d{{5}} parameters; loss (\d\.\d{{4}})",
                r"tp: \d+ bytes a step",
                rf"dp{world_size}: rank 0 holds layers \[0, 1, 2, 3\], \d{{5}} parameters; loss \1",
                r"one process: loss \1",
            ),
            (backend,),
        )
        for world_size, shape, backend in ((8, "dp2 tp2 pp2", "unisono"), (4, "tp2 pp2", "gloo"))
    ),
    Example(
        "07_ring_attention.py",
        2,
        ("contiguous: .* True", "zigzag: .* True", "against 769 keys on 2 ranks: within 1e-5: True"),
    ),
    Example(
        "08_parameter_server.py",
        3,
        (
            r"all_reduce \(ring\) +loss 0\.\d+ +\d.* at rank 0",
            r"server, synchronous +loss 0\.\d+",
            r"server, staleness 2 +loss 0\.\d+",
        ),
    ),
    Example(
        "13_decode.py",
        2,
        tuple(rf"{name}, eager: \d+ tokens/s, 12 of 12 as of one process" for name in ("unisono", "Gloo")),
        ("unisono",),
    ),
]

TWO_HOSTS = "09_two_hosts.py"  # its own test: it is for two agents of torchrun, not for ranks that are given to it

SAME = "".join(rf".*{kind}, version {n}: .* on all three: True" for kind in ("Llama", "GPT-2") for n in range(1, 6))
REWARD = r"reward: 0\.[01]\d in the first five steps, 0\.[3-9]\d in the last five"
GOES_ON = "".join(rf"after step {k}: .*rank {r} .*is dead.*{n} ranks go on.*" for k, r, n in ((10, 3, 3), (20, 0, 2)))
GOES_ON += r"loss 0\.5\d+ to 0\.0\d+; .* by (0e\+00|\de-0[789]).*exit codes: \[-9, 0, 0, -9\]"
STARTERS = [
    ("10_weight_update.py", "transformers", SAME, ()),
    ("11_reinforce.py", "torch", r"step 60: samples of \(60, 60\), .*" + REWARD, ()),
    ("11_reinforce.py", "torch", r"step 60: samples of \(60,\), .*" + REWARD, ("--fsdp",)),
    ("12_survivors.py", "torch", GOES_ON, ("--fsdp",)),
]
"""Files that start their processes themselves, what they need, what they print, their arguments."""
SOAKED = [pytest.param("12_survivors.py", "torch", GOES_ON, (), marks=pytest.mark.soak)]


def on_ranks_run(rank: int, world_size: int, example: Example, backend: str, port: int) -> str:
    """Run the file as torchrun does, in this process; returns what it printed."""
    settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "BACKEND": backend}
    before, arguments = dict(os.environ), sys.argv
    os.environ.update({name: str(value) for name, value in settings.items()})
    sys.argv = [example.file, *example.arguments]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(FOLDER / example.file), run_name="__main__")
    finally:
        os.environ.clear()
        os.environ.update(before)
        sys.argv = arguments
    return printed.getvalue()


ELSEWHERE = {"04_pipeline.py", "05_operator_split.py", "06_three_dimensions.py", "08_parameter_server.py"}
"""Files that show what tests/parallel runs on Gloo too."""
CASES = [
    pytest.param(
        example, backend, id=f"{example.file}-{backend}",
        marks=[pytest.mark.soak] if backend == "gloo" and example.file in ELSEWHERE else [],
    )
    for example in EXAMPLES for backend in example.backends
]  # fmt: skip


@pytest.mark.parametrize(("example", "backend"), CASES)
def test_example(example: Example, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = ranks(example.world_size, group=False).run(on_ranks_run, example, backend, free_port())[0]
    assert re.search(".*".join(example.prints), printed, re.DOTALL), printed


def another_host(host: int) -> None:
    """Has a boot id of its own, as hosts do."""
    hosts._boot_id = lambda: f"host-{host}"


def test_two_hosts(tmp_path: Path) -> None:
    """The commands that the example shows, as two agents on this host, which fork their ranks to save the imports."""
    place = f"--master-addr 127.0.0.1 --master-port {free_port()}"
    how = f"{place} --run-path --start-method fork {FOLDER}"
    commands = re.findall(r"^    torchrun (.*)$", (FOLDER / TWO_HOSTS).read_text(), re.MULTILINE)
    commands = [command.replace("--master-addr 10.0.0.1 examples", how) for command in commands]
    files = [tmp_path / f"host {host}" for host in range(len(commands))]
    starts = enumerate(zip(commands, files, strict=True))
    running = [agents.start(command, file, partial(another_host, host)) for host, (command, file) in starts]
    codes = [agents.end(agent) for agent in running]
    printed = [file.read_text() for file in files]
    assert codes == [0, 0], printed
    for host, text in enumerate(printed):
        found = re.findall(rf"rank (\d), number (\d) on host {host}: equal to a flat all_reduce", text)
        assert sorted(found) == [(str(2 * host), "0"), (str(2 * host + 1), "1")], text
    flat, by_hosts = re.findall(r"DDP, .*: loss (0\.0\d+) on rank 0", printed[0])
    assert abs(float(flat) - float(by_hosts)) < 1e-4


@pytest.mark.parametrize(("file", "needs", "prints", "arguments"), [*STARTERS, *SOAKED])
@pytest.mark.timeout(240)
def test_starts_its_processes(file: str, needs: str, prints: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed: pip install unisono[{needs}], or make test-frameworks")
    printed, changed = tmp_path / "printed", {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    program = agents.python([str(FOLDER / file), *arguments], printed, changed, tmp_path)
    assert agents.end(program, 220.0) == 0, printed.read_text()
    assert re.search(prints, printed.read_text(), re.DOTALL), printed.read_text()
    assert len(list(tmp_path.glob("*.png"))) == (file[:2] in ("11", "12"))


def test_every_example_is_in_the_table_and_short() -> None:
    files = sorted(file.name for file in FOLDER.glob("*.py"))
    assert files == sorted({example.file for example in EXAMPLES} | {TWO_HOSTS} | {file for file, *_ in STARTERS})
    for file in files:
        assert (FOLDER / file).read_text().count("\n") < 80, file

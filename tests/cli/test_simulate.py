import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from unisono.algorithms import build
from unisono.cli.main import app

LATENCY = 0.6e-6  # of nvlink, what few ranks run on by default


def _simulate(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["simulate", *arguments], input=stdin)


def test_says_time_bandwidth_messages_and_the_constants() -> None:
    result = _simulate("ring", "-n", "4", "--bytes", "0")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "ring all_reduce of 0 B over 4 ranks: 3.6 µs"
    assert lines[2] == "6 steps, 24 messages, 0 B over nvlink in all"
    assert lines[3] == "nvlink: 4 ranks over nvlink (0.6 µs, 400 GB/s, switched); sums at 1000 GB/s"
    assert lines[5:7] == ["Critical path", "     0 s  step 0: rank 3 waits for rank 2: 0 B over nvlink"]
    assert lines[-1] == "  3.6 µs  rank 0 is the last to end"


def test_bytes_take_their_time() -> None:
    result = _simulate("tree", "broadcast", "-n", "2", "--bytes", "1GB", "--topology", "ethernet", "--path", "0")
    assert result.stdout.startswith(
        "tree broadcast of 954 MiB over 2 ranks: 800 ms\nalgbw 1.25 GB/s, busbw 1.25 GB/s\n"
    )
    assert "Critical path" not in result.stdout


def test_reads_a_schedule_from_standard_input() -> None:
    result = _simulate("-", "--path", "1", stdin=build("tree", "reduce", 3, root=1).to_text())
    assert result.stdout.startswith("tree reduce of 1 MiB over 3 ranks: ")


def test_a_cluster_has_as_many_hosts_as_asked() -> None:
    result = _simulate("ring", "-n", "12", "--topology", "cluster", "--hosts", "3")
    assert "cluster: 3 hosts of 4 ranks over nvlink" in result.stdout


def test_eager_leaves_latency_to_the_wire() -> None:
    slow = _simulate("ring", "-n", "16", "--bytes", "0")
    fast = _simulate("ring", "-n", "16", "--bytes", "0", "--eager")
    assert slow.stdout.startswith("ring all_reduce of 0 B over 16 ranks: 81 µs")
    assert fast.stdout.startswith("ring all_reduce of 0 B over 16 ranks: 26.4 µs")


def test_compares_24576_ranks_in_seconds() -> None:
    began = time.process_time()
    result = _simulate("--ranks", "24576", "--compare", "ring,tree,double_tree")
    assert time.process_time() - began < 10
    assert result.exit_code == 0
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in result.stdout.splitlines() if "│" in line}
    assert [cell.strip() for cell in rows["ring"]][:2] == ["49150", "133 ms"]
    ratios = [float(rows["ring"][i].strip().removesuffix("×")) for i in (2, 4)]
    assert all(100 <= ratio <= 1100 for ratio in ratios)
    assert "3072 hosts of 8 ranks over nvlink (0.6 µs" in result.stdout
    assert "up to 180 times lower latency than rings" in result.stdout


def test_a_small_comparison_makes_no_announcement() -> None:
    result = _simulate("--compare", "ring,double_tree", "barrier", "-n", "8")
    assert result.exit_code == 2  # the first word is a schedule
    result = _simulate("--compare", "ring, double_tree", "-n", "8", "--bytes", "1MiB", "--chunks", "8")
    assert result.exit_code == 0
    assert "180 times" not in result.stdout


def test_default_is_what_runs_for_the_size() -> None:
    assert _simulate("default", "--bytes", "4").stdout.startswith("one_shot all_reduce of 4 B over 4 ranks: ")
    assert _simulate("default", "--bytes", "1MiB").stdout.startswith("two_phase all_reduce of 1 MiB over 4 ranks: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one schedule"),
        (["ring", "--compare", "tree"], "give one schedule"),
        (["--compare", "ring,nope"], "no algorithm and no file is called 'nope'"),
        (["--compare", "ring,1f1b"], "--compare takes algorithms, or pipeline schedules (gpipe, "),
        (["1f1b", "--topology", "pcie"], "--topology is of collectives, and 1f1b is a pipeline schedule"),
        (["--compare", "ring,tree", "--eager"], "--eager is a column of --compare anyway"),
        (["--compare", "ring,tree", "--path", "3"], "--path is of one schedule"),
        (["1f1b", "--path", "3"], "--path is of collectives"),
        (["1f1b", "--eager"], "--eager is of collectives"),
        (["ring", "--link", "1"], "--link is of pipelines: leave it out"),
        (["1f1b", "--times", "1,2"], "--times is '1,2', expected three numbers such as 1,1,1"),
        (["1f1b", "--times", "-1,1,1"], "forward must not be below zero"),
        (["1f1b", "-m", "0"], "at least one microbatch, got 0"),
        (["1f1b", "--per-rank", "2"], "1f1b has 1 stage on a rank, not 2: use interleaved"),
        (["nope"], "no algorithm and no file is called 'nope'"),
        (["ring", "-n", "0"], "world_size must be at least 1"),
        (["ring", "--bytes", "12x"], "'12x' is not a size"),
        (["ring", "--bytes", "-1"], "'-1' is not a size"),
        (["ring", "--topology", "pigeon"], "unknown topology 'pigeon'"),
        (["ring", "-n", "6", "--topology", "cluster", "--hosts", "4"], "6 ranks do not divide among 4 hosts"),
        (["ring", "-n", "6", "--topology", "cluster", "--hosts", "0"], "6 ranks do not divide among 0 hosts"),
        (["ring", "--hosts", "3+2"], "hosts 3+2 have 5 ranks, not 4"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = _simulate(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("unisono: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "unisono.cli", "simulate", "ring", "-n", "4"]
    with os.fdopen(writer, "wb") as gone:
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_loads_no_torch() -> None:
    code = "import sys; import unisono.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_hosts_may_be_unequal_and_a_topology_a_file(tmp_path: Path) -> None:
    result = _simulate("leaders", "-n", "4", "--hosts", "3+1", "--bytes", "4")
    assert "cluster: 2 hosts of 3+1 ranks over nvlink" in result.stdout
    link = {"name": "wire", "alpha": 1e-3, "beta": 1e-8}
    file = tmp_path / "two.json"
    file.write_text(
        json.dumps({"topology": "lab", "hosts": [[0, 1, 2], [3, 4]], "intra": link, "between": [[None, link]] * 2})
    )
    result = _simulate("leaders", "--bytes", "4", "--topology", str(file))
    assert result.stdout.startswith("leaders all_reduce of 4 B over 5 ranks: 3 ms")
    assert "lab: 2 hosts of 3+2 ranks over wire" in result.stdout
    assert "as ranks execute it there" not in result.stdout
    slow = {"name": "far", "alpha": 21e-3, "beta": 1e-8, "announcement": 1e-2}
    file.write_text(
        json.dumps(
            {"topology": "lab", "hosts": [[0, 1, 2], [3, 4]], "intra": link, "between": [[None, slow], [slow, None]]}
        )
    )
    result = _simulate(
        "leaders", "--bytes", "4", "--topology", str(file)
    )  # headers, the leaders' sums, one meeting more
    assert "as ranks execute it there, by what was measured: 23 ms" in result.stdout
    result = _simulate("default", "--bytes", "4", "--topology", str(file))
    assert result.stdout.startswith("one_shot all_reduce of 4 B over 5 ranks")
    assert "as ranks execute it there, by what was measured: 11 ms" in result.stdout
    file.write_text(
        json.dumps({"topology": "lab", "hosts": [[0, 1, 2], [3, 4]], "intra": link, "between": [[None, link]] * 2})
    )
    assert "has 5 ranks, not 4" in _simulate("ring", "-n", "4", "--topology", str(file)).stderr
    assert "leave it out" in _simulate("ring", "--hosts", "2", "--topology", str(file)).stderr

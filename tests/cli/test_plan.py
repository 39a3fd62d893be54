from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from unisono.backend.device_facts import Facts
from unisono.cli.main import app
from unisono.cli.programs import is_oversubscribed
from unisono.program import Default, default
from unisono.program.defaults import TABLE
from unisono.schedule import COLLECTIVES
from unisono.selection import Measured, Row


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_explains_a_size_then_shows_all_sizes_and_crossovers() -> None:
    result = _plan("all_reduce", "--bytes", "1MiB", "--ranks", "4")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "all_reduce of 1 MiB over 4 ranks: two_phase, 238 µs by the model"
    assert lines[2].startswith("  because bytes on the wire dominate")
    assert any(line.split()[:4] == ["4", "B", "one_shot", "1"] for line in lines)
    assert any(line.split()[:3] == ["1", "GiB", "two_phase"] for line in lines)
    # alpha + 3 S (beta + gamma) meets 2 alpha + 1.5 S beta + 0.75 S gamma at 2667 bytes; found to within a percent
    assert lines[-2] in {f"one_shot up to {x} KiB, then two_phase" for x in ("2.6", "2.61", "2.62", "2.63")}
    assert lines[-1].startswith("not considered: columns (has one host to work on), hierarchical (has one host to work")
    assert all(len(line) <= 80 for line in lines if "B  " in line[:9])


def test_only_the_table_without_a_size() -> None:
    result = _plan("all_gather", "-n", "4", "--topology", "cluster", "--hosts", "2")
    assert result.stdout.startswith("cluster: 2 hosts of 2 ranks over nvlink")


def test_a_barrier_has_no_sizes() -> None:
    result = _plan("barrier", "-n", "4")
    assert result.stdout.startswith("barrier over 4 ranks: one_shot, 1 µs by the model\n")
    assert "GiB" not in result.stdout


def test_what_was_measured_here_counts_more_than_the_model() -> None:
    Measured([Row("all_reduce", 2, "star", 1024, 1e-6), Row("all_reduce", 2, "ring", 1024, 3e-6)]).save()
    lines = _plan("all_reduce", "--bytes", "1KiB", "-n", "2").stdout.splitlines()
    assert lines[0] == "all_reduce of 1 KiB over 2 ranks: star, 1 µs as measured here"
    assert "star at every size" in lines
    for model in (["--model"], ["--topology", "shared_memory"]):
        assert "by the model" in _plan("all_reduce", "--bytes", "1KiB", "-n", "2", *model).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["allreduce"], "unknown collective 'allreduce': expected one of all_reduce, "),
        (["all_reduce", "-n", "0"], "at least 1 rank"),
        (["all_reduce", "--bytes", "many"], "'many' is not a size"),
        (["all_reduce", "--topology", "pigeon"], "unknown topology 'pigeon'"),
        ([], "which collective? E.g. `unisono plan all_reduce`"),
        (["--bytes", "1MiB"], "which collective? E.g. `unisono plan all_reduce`"),
        (["all_reduce", "--oversubscribed"], "for the defaults: give --default as well"),
        (["--default", "allreduce"], "unknown collective 'allreduce': expected one of all_reduce, "),
        (["--default", "--bytes", "1MiB"], "--bytes chooses one row of the defaults: give COLLECTIVE as well"),
        (["--default", "all_reduce", "-n", "4"], "--ranks chooses one row of the defaults: give --bytes as well"),
        (["--default", "all_reduce", "--bytes", "1", "-n", "0"], "at least 1 rank"),
        (["--default", "all_reduce", "--model"], "--model is for a choice by cost, the defaults are a table"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = _plan(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_a_spoilt_table_is_named(tmp_path: Path) -> None:
    path = Measured().save()
    path.write_text("no table")
    result = _plan("all_reduce")
    assert result.exit_code == 2
    assert f"{path} is no table of `unisono tune`" in result.stderr


def test_the_table_of_defaults_has_a_line_per_row_and_fits_a_terminal() -> None:
    result = CliRunner().invoke(app, ["plan", "--default"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    head, *lines = result.stdout.splitlines()
    assert head.split()[:3] == ["collective", "up", "to"]
    rows = lines[: lines.index("")]
    assert all(want.schedule in row.split() for row, want in zip(rows, TABLE, strict=True))
    assert {row.split()[0] for row in rows} >= set(COLLECTIVES)
    assert max(map(len, (head, *lines))) <= 80


def test_the_table_of_one_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        Default("barrier", 1 << 62, "one_shot"),
        Default("all_reduce", 1 << 17, "one_shot", times_ranks=True),
        Default("all_reduce", 1 << 62, "ring", oversubscribed=True, chunks=0, cap=1 << 18),
        Default(
            "all_reduce",
            1 << 62,
            "two_phase",
            "mailbox",
            oversubscribed=False,
            directly="direct",
            directly_above=1 << 20,
        ),
    )
    monkeypatch.setattr("unisono.cli.programs.TABLE", table)
    lines = CliRunner().invoke(app, ["plan", "--default", "all_reduce"], env={"COLUMNS": "120"}).stdout.splitlines()
    assert lines[:4] == [
        "collective  up to      cores   schedule   placement  chunks  at most  shared",
        "all_reduce  128 KiB/n          one_shot   staged     1",
        "            any        shared  ring       staged     n       256 KiB",
        "            any        own     two_phase  mailbox    1                direct >1MiB",
    ]
    assert lines[-1] == "Cores: each rank has its own, or there are more ranks than cores."


@pytest.mark.parametrize("oversubscribed", [True, False])
def test_the_row_for_a_size_is_the_one_the_backend_asks_for(oversubscribed: bool) -> None:
    for nbytes, size in (("4KiB", 4096), ("1MiB", 1 << 20)):
        option = "--oversubscribed" if oversubscribed else "--no-oversubscribed"
        lines = _plan("--default", "all_reduce", "--bytes", nbytes, "-n", "4", option).stdout.splitlines()
        row = default("all_reduce", size, 4, oversubscribed)
        assert lines[0].endswith(f"over 4 ranks: {row.schedule}")
        assert lines[1] == ("  fewer cores than ranks" if oversubscribed else "  a core for each rank")
        assert lines[2].startswith(f"  {row.placement}: ")
        assert lines[-1] == f"  drawn by `unisono draw default all_reduce -n 4 --bytes {nbytes}`"


def test_a_row_tells_pieces_and_meetings() -> None:
    lines = _plan("--default", "all_reduce", "--bytes", "8MiB", "-n", "4", "--no-oversubscribed").stdout.splitlines()
    # a half of 1 MiB holds 3 slots of 341 KiB; a piece is met for twice, but the meetings of neighbours are one
    assert lines[2] == "  mailbox: 4 chunks in 7 pieces, 293 KiB of a chunk at a time, 8 meetings"
    assert lines[3] == "  direct between shared tensors: 4 chunks in 1 piece, 2 MiB of a chunk at a time, 2 meetings"


def test_shared_tensors_count_from_their_size_on() -> None:
    small, large = (_plan("--default", "broadcast", "--bytes", size, "-n", "2").stdout for size in ("1MiB", "1025KiB"))
    assert "shared tensors" not in small
    assert "\n  direct or pushed between shared tensors: 2 chunks in 1 piece, " in large


def test_the_bytes_of_a_gathering_are_those_of_all_ranks() -> None:
    first = _plan("--default", "all_gather", "--bytes", "8MiB", "-n", "4").stdout.splitlines()[0]
    assert first == "all_gather of 8 MiB, 2 MiB a rank, over 4 ranks: direct"


def test_ranks_and_cores_of_this_machine() -> None:
    ranks = next(n for n in range(1, 4096) if is_oversubscribed(n))
    lines = _plan("--default", "barrier", "-n", str(ranks)).stdout.splitlines()
    assert lines[1] == f"  fewer cores than ranks: {ranks} ranks on {ranks - 1} core{'s' * (ranks != 2)} here"


def test_on_gpus_it_says_why_a_host_runs_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {k: Facts(f"gpu {k}", "GPU", 132, ("gpu 0", "gpu 1"), (f"gpu {k}",), "", True) for k in range(2)}
    monkeypatch.setattr("unisono.backend.device_facts.own_facts", lambda device, *_: found[device.index])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    why = "But on this host all calls on GPUs go to NCCL: a GPU can not map the memory of a peer"
    assert _plan("--default", "--device", "cuda", "-n", "2").stdout.splitlines()[-1] == why
    assert why not in _plan("--default", "--device", "cuda", "-n", "4").stdout  # of other hosts, it does not know
    refused = _plan("--default", "--device", "cuda", "--bytes", "1MiB")
    assert refused.exit_code == 2
    assert "--bytes is for CPUs: leave it out" in refused.stderr

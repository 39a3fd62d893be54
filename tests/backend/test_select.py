"""Schedules chosen by measurement: the table that `unisono tune` keeps decides, on all ranks alike."""

import os
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import unisono
from hangs.job import Fault, attempt
from ranks import ranks
from unisono.backend.options import from_environment
from unisono.runtime import choice
from unisono.schedule import preset
from unisono.selection import Measured, Row, select, table_path
from unisono.torch_names import all_gather_single, reduce_scatter_single

SMALL, LARGE = 256, 1 << 18  # bytes
SERVED = ("all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather")
FASTEST = {
    "all_reduce": ("recursive_doubling", "ring"),
    "reduce": ("tree", "chain"),
    "broadcast": ("tree", "double_tree"),
    "reduce_scatter": ("direct", "ring"),
    "all_gather": ("bruck", "ring"),
}
"""Of a table of times: what it finds fastest for small tensors, and for large ones."""


def table(world_size: int) -> Measured:
    """Times of two algorithms, and of a third that is slow, where small and large tensors lie in between."""
    rows = []
    for collective, (small, large) in FASTEST.items():
        for nbytes, times in ((64, (1e-6, 5e-6)), (1 << 20, (5e-3, 1e-3))):
            rows += [
                Row(collective, world_size, name, nbytes, t) for name, t in zip((small, large), times, strict=True)
            ]
            rows.append(Row(collective, world_size, "star", nbytes, 1.0))
    return Measured(rows)


def keep(home: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch) -> str:
    """Writes a table to where the ranks that have this cache directory find it."""
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        measured.save()
        assert table_path().is_relative_to(home)
    return str(home)


def begin(rank: int, world_size: int, path: str, cache_home: str, how: str) -> None:
    """This process as one that has just begun, with a default group that goes by measurements."""
    os.environ["XDG_CACHE_HOME"] = cache_home
    choice._table.cache_clear(), choice.table_mark.cache_clear(), choice._selector.cache_clear()
    if how == "environment":
        os.environ["UNISONO_SELECT"] = "measured"
    options = unisono.Options(select="measured") if how == "options" else None
    try:
        where = f"file://{path}"
        dist.init_process_group("unisono", where, rank=rank, world_size=world_size, pg_options=options)
    finally:
        os.environ.pop("UNISONO_SELECT", None)


def end() -> None:
    """Leaves nothing behind."""
    dist.destroy_process_group()
    os.environ.pop("XDG_CACHE_HOME", None)


def every_call(rank: int, world_size: int, nbytes: int) -> list[str]:
    """One of each that measurements serve, of so many bytes in all, and the others; what was wrong."""
    n = nbytes // 4 // world_size
    whole = torch.arange(n * world_size, dtype=torch.float32)
    block = whole[n * rank : n * (rank + 1)]
    total = whole * sum(range(1, world_size + 1))
    x, y, z = whole * (rank + 1), whole * (rank + 1), whole * (rank == world_size - 1)
    dist.all_reduce(x)
    dist.reduce(y, 1)
    dist.broadcast(z, world_size - 1)
    part, gathered, pieces = torch.empty(n), torch.empty_like(whole), torch.empty_like(whole)
    reduce_scatter_single(part, whole * (rank + 1))
    all_gather_single(gathered, block.clone())
    dist.all_to_all_single(pieces, whole * (rank + 1))
    exchanged = torch.cat([block * (peer + 1) for peer in range(world_size)])
    listed = [torch.empty(n + r) for r in range(world_size)]
    dist.all_gather(listed, torch.full((n + rank,), float(rank)))
    dist.barrier()
    found = {
        "all_reduce": torch.equal(x, total),
        "reduce": torch.equal(y, total if rank == 1 else whole * (rank + 1)),
        "broadcast": torch.equal(z, whole),
        "reduce_scatter": torch.equal(part, total[n * rank : n * (rank + 1)]),
        "all_gather": torch.equal(gathered, whole),
        "all_to_all": torch.equal(pieces, exchanged),
        "uneven all_gather": all(each.eq(float(r)).all() for r, each in enumerate(listed)),
    }
    return [name for name, right in found.items() if not right]


def by_a_table(
    rank: int, world_size: int, path: str, home: str, how: str, sizes: tuple[int, ...]
) -> tuple[list[str], list[tuple[str, int, str]]]:
    """What was wrong, and what was chosen: collective, bytes, schedule."""
    begin(rank, world_size, path, home, how)
    chosen, choose = [], choice.by_name

    def noted(name: str, collective: str, *rest: object) -> choice.Choice:
        chosen.append((collective, nbytes, name))
        return choose(name, collective, *rest)

    choice.by_name = noted
    wrong = []
    try:
        for nbytes in sizes:
            wrong += every_call(rank, world_size, nbytes)
    finally:
        choice.by_name = choose
        end()
    return wrong, chosen


@pytest.mark.parametrize(("how", "world_size"), [("options", 2), ("environment", 4)])
def test_the_table_decides_for_every_size(
    how: str, world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = keep(tmp_path / "cache", table(world_size), monkeypatch)
    wanted = [(each, nbytes, FASTEST[each][k]) for k, nbytes in enumerate((SMALL, LARGE)) for each in SERVED]
    pool = ranks(world_size, group=False)
    for wrong, chosen in pool.run(by_a_table, str(tmp_path / "meeting"), home, how, (SMALL, LARGE)):
        assert wrong == []
        assert sorted(set(chosen)) == sorted(wanted)


def test_without_a_table_the_simulator_chooses(tmp_path: Path) -> None:
    """Also for a collective, or a number of ranks, that the table does not know."""
    topology = preset("shared_memory", 3)
    sizes = (240, 240_000)

    @cache
    def simulated(collective: str, nbytes: int) -> str:
        return select(collective, nbytes, topology).best.candidate.algorithm.name

    found = ranks(3, group=False).run(by_a_table, str(tmp_path / "meeting"), str(tmp_path / "none"), "options", sizes)
    for wrong, chosen in found:
        assert wrong == []
        assert {collective for collective, _, _ in chosen} == set(SERVED)
        assert chosen == [(collective, nbytes, simulated(collective, nbytes)) for collective, nbytes, _ in chosen]


def by_different_tables(rank: int, world_size: int, path: str, homes: list[str], how: str) -> list[Fault]:
    """Calls that measurements decide differ; those that they do not serve, and a block's own choice, are fine."""
    begin(rank, world_size, path, homes[rank], how)
    x, pieces = torch.ones(1000), torch.empty(1000)
    found = [
        attempt(lambda: dist.all_reduce(x)),
        attempt(lambda: dist.broadcast(x, 0, async_op=True).wait()),
        attempt(lambda: dist.all_to_all_single(pieces, x)),
        attempt(dist.barrier),
    ]
    with unisono.algorithm("ring"):
        found.append(attempt(lambda: dist.all_reduce(x)))
    found.append(Fault("", str(x.sum().item()), 0.0, 0.0))
    end()
    return found


def test_ranks_whose_tables_differ_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = table(2).merged(Measured([Row("all_reduce", 2, "ring", 64, 1e-9)]))
    homes = [
        keep(tmp_path / "a", table(2), monkeypatch),
        keep(tmp_path / "b", other, monkeypatch),
        str(tmp_path / "none"),
    ]
    for k, (one, two) in enumerate(((0, 1), (0, 2))):
        pair = [homes[one], homes[two]]
        found = ranks(2, group=False).run(by_different_tables, str(tmp_path / f"meeting{k}"), pair, "environment")
        for summed, sent, *others, total in found:
            for fault, call in ((summed, "all_reduce"), (sent, "broadcast")):
                lines = (
                    rf"rank 0: {call}\(float32 \[1000\], .*by measured \w+\)",
                    rf"rank 1: {call}\(.*by measured \w+\)",
                )
                fault.says("MismatchError", *lines)
            assert [fault.kind for fault in others] == [""] * 3
            assert total.text == "2000.0"


def some_by_measurement(rank: int, world_size: int, path: str, home: str) -> Fault:
    """Rank 1 alone goes by measurements."""
    begin(rank, world_size, path, home, "options" if rank else "")
    found = attempt(lambda: dist.all_reduce(torch.ones(10)))
    end()
    return found


def test_a_rank_that_goes_by_the_defaults_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = keep(tmp_path / "cache", table(2), monkeypatch)
    for fault in ranks(2, group=False).run(some_by_measurement, str(tmp_path / "meeting"), home):
        fault.says(
            "MismatchError", r"rank 0: all_reduce\(float32 \[10\], SUM\)", r"rank 1: all_reduce.*by measured \w+\)"
        )


def summed_exactly(rank: int, world_size: int, path: str, home: str, exact: list[bool]) -> Fault:
    """The bits of a sum in rank order, if all ranks ask for them."""
    os.environ["UNISONO_DETERMINISTIC"] = "1" if exact[rank] else "0"
    try:
        begin(rank, world_size, path, home, "environment")
        mine = torch.randn(5000, generator=torch.Generator().manual_seed(rank))
        by_default, x = mine.clone(), mine.clone()
        with unisono.algorithm("two_phase", deterministic=True):
            dist.all_reduce(by_default)
        found = attempt(lambda: dist.all_reduce(x))
        end()
    finally:
        os.environ.pop("UNISONO_DETERMINISTIC", None)
    return found if found.kind else found._replace(text=str(torch.equal(x, by_default)))


def test_in_rank_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Measured([Row("all_reduce", 3, "ring", 64, 1e-6)])
    pool, home = ranks(3, group=False), keep(tmp_path / "cache", slow, monkeypatch)
    same = pool.run(summed_exactly, str(tmp_path / "all"), home, [True] * 3)
    assert [(fault.kind, fault.text) for fault in same] == [("", "True")] * 3
    for fault in pool.run(summed_exactly, str(tmp_path / "some"), home, [True, False, True]):
        fault.says("MismatchError", "rank 1: all_reduce")


def with_a_spoilt_table(rank: int, world_size: int, path: str, home: str) -> list[Fault]:
    begin(rank, world_size, path, home, "options")
    found = [attempt(lambda: dist.all_reduce(torch.ones(10))), attempt(dist.barrier)]
    end()
    return found


def test_a_spoilt_table_is_named_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = keep(tmp_path / "cache", table(2), monkeypatch)
    (file,) = (tmp_path / "cache" / "unisono").iterdir()
    file.write_text("{}")
    for fault, later in ranks(2, group=False).run(with_a_spoilt_table, str(tmp_path / "meeting"), home):
        fault.says("UsageError", r"is no table of `unisono tune` .*: delete it or measure again")
        assert not later.kind


def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(unisono.UsageError, match=r"^Options\(select='fastest'\): expected 'default' or 'measured'$"):
        unisono.Options(select="fastest")
    monkeypatch.delenv("UNISONO_ALGORITHM", raising=False)
    for text, measured in (("", False), ("default", False), ("measured", True)):
        monkeypatch.setenv("UNISONO_SELECT", text)
        assert from_environment() == (unisono.Options(select="measured") if measured else None)
    monkeypatch.setenv("UNISONO_SELECT", "1")
    with pytest.raises(unisono.UsageError, match=r"^UNISONO_SELECT is '1', expected default or measured$"):
        from_environment()


def test_times_of_gpus_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = set()
    for rows in ([], [Row("all_reduce", 2, "one_shot", 64, 1.0, "cuda")], [Row("all_reduce", 2, "ring", 64, 1.0)]):
        monkeypatch.setattr(choice, "_table", lambda rows=rows: Measured(rows))
        choice.table_mark.cache_clear()
        marks.add(choice.table_mark())
    choice.table_mark.cache_clear()
    assert len(marks) == 2

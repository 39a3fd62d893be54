import pytest
import torch
import torch.distributed as dist

from ranks import ranks
from unisono.bench import measure as measuring
from unisono.bench.machine import limit_of
from unisono.bench.measure import measure
from unisono.bench.result import Rates, Row
from unisono.bench.settings import COLLECTIVES, Contender, Settings
from unisono.bench.torch_calls import TorchCaller

RATES = Rates((1,), (1e9,), (1e9,))


def test_the_bound_is_the_bytes_at_the_rate_of_copying() -> None:
    assert RATES.bound("all_reduce", 1000, 4, "in") == pytest.approx(1e-6)
    assert RATES.bound("broadcast", 1000, 2, "in") == pytest.approx(0.5e-6)
    assert RATES.bound("barrier", 0, 2, "out") == 0


def test_what_limits_a_call() -> None:
    def limit(seconds: float, fixed: float, skew: float, reduce: float = 1e9, op: str = "all_reduce") -> str:
        return limit_of(op, 1000_000, 2, seconds, fixed, skew, Rates((1,), (1e9,), (reduce,)))

    assert limit(1.0, 0.5, 0.9) == "latency"
    assert limit(10.0, 1.0, 0.9) == "latency"  # what must be moved takes a thousandth of what any call takes
    assert limit(0.01, 1e-5, 0.5) == "skew"
    assert limit(0.01, 1e-5, 0.1) == "copy"
    assert limit(0.01, 1e-5, 0.1, reduce=1e8) == "reduce"
    assert limit(0.01, 1e-5, 0.1, reduce=1e8, op="broadcast") == "copy"


def bench(rank: int, world_size: int, settings: Settings) -> list[Rates | Row]:
    told: list[Rates | Row] = []
    others = {c.backend for c in settings.contenders} - {"unisono"}
    callers = {"unisono": TorchCaller()} | {name: TorchCaller(dist.new_group(backend=name)) for name in others}
    measure(settings, rank, callers, told.append)
    for name in others:
        dist.destroy_process_group(callers[name].group)
    return told


def test_every_collective_against_gloo() -> None:
    contenders = (Contender("unisono"), Contender("gloo"))
    settings = Settings(COLLECTIVES, 2, 8, 1 << 10, 128, contenders=contenders, runs=3, warm_up=0, seconds=0.01)
    (rates, *rows), silent = ranks(2).run(bench, settings)
    assert silent == []
    assert isinstance(rates, Rates)
    assert min(*rates.copy, *rates.reduce) > 1e6
    keys = [(row.collective, row.nbytes, row.contender) for row in rows if isinstance(row, Row)]
    assert keys == [
        (name, nbytes, contender.name)
        for name in COLLECTIVES
        for nbytes in ([8, 1024] if name != "barrier" else [0])
        for contender in contenders
    ]
    for row in rows:
        assert isinstance(row, Row)
        assert (len(row.seconds), row.wrong, row.refused) == (3, 0, ""), row
        assert 1e-6 < row.time < 1
        assert row.limit in ("latency", "skew", "copy", "reduce")


def test_algorithms_dtypes_and_refusals() -> None:
    contenders = (Contender("unisono", "ring"), Contender("unisono", "bruck"), Contender("unisono"))
    settings = Settings(
        ("all_reduce", "broadcast"), 3, 8, 8, dtype="bfloat16", op="avg", place="out", contenders=contenders,
        asynchronous=True, runs=1, warm_up=0, seconds=0.01,
    )  # fmt: skip
    _, *rows = ranks(3).run(bench, settings)[0]
    found = {(r.collective, r.contender): r for r in rows if isinstance(r, Row)}
    assert [found["all_reduce", c.name].wrong for c in contenders] == [0, 0, 0]
    assert found["broadcast", "unisono"].op == "none"
    assert "ring" in found["broadcast", "unisono:ring"].refused
    assert found["broadcast", "unisono:ring"].seconds == ()
    assert found["broadcast", "unisono"].wrong == 0


def wrong_on_one_rank(rank: int, world_size: int, settings: Settings) -> list[Rates | Row]:
    original = measuring.Case.wrong

    def wrong(case: measuring.Case, output: torch.Tensor) -> int:
        return original(case, output) + (rank == 1) * 5

    measuring.Case.wrong = wrong  # type: ignore[method-assign]
    try:
        return bench(rank, world_size, settings)
    finally:
        measuring.Case.wrong = original  # type: ignore[method-assign]


def test_what_is_wrong_on_any_rank_counts() -> None:
    settings = Settings(least=64, most=64, runs=1, warm_up=0, seconds=0.01)
    assert [row.wrong for row in ranks(2).run(wrong_on_one_rank, settings)[0] if isinstance(row, Row)] == [5]


def test_a_backend_that_torch_lacks_is_shown_as_refused() -> None:
    contenders = (Contender("unisono"), Contender("gloo"))
    settings = Settings(("barrier",), contenders=contenders, runs=1, warm_up=0, seconds=0.01)
    (_, mine, other), _ = ranks(2).run(bench_without, settings)
    assert (mine.refused, mine.wrong) == ("", 0)
    assert (other.contender, other.seconds) == ("gloo", ())
    assert other.refused.endswith(" is built without it")


def bench_without(rank: int, world_size: int, settings: Settings) -> list[Rates | Row]:
    told: list[Rates | Row] = []
    measure(settings, rank, {"unisono": TorchCaller()}, told.append)
    return told

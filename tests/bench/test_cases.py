import pytest
import torch

from ranks import ranks
from unisono.bench.cases import Case
from unisono.bench.result import bound_nbytes
from unisono.bench.settings import COLLECTIVES, IN_PLACE, Settings, block_count
from unisono.bench.torch_calls import TorchCaller
from unisono.bench.values import Tables
from unisono.simulation import bus_factor


def test_factors_are_those_of_nccl_tests() -> None:
    factors = {name: bus_factor(name, 4) for name in COLLECTIVES}
    assert factors == {
        "all_reduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75, "all_to_all": 0.75, "gather": 0.75,
        "scatter": 0.75, "broadcast": 1.0, "reduce": 1.0, "send_recv": 1.0, "barrier": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("collective", "place", "nbytes"),
    [
        ("all_reduce", "in", 2 * 4 * 100),  # every rank reads its own and writes the sum
        ("reduce", "in", 4 * 100 + 100),
        ("broadcast", "in", 100 + 3 * 100),  # read once, written by all but the root
        ("broadcast", "out", 100 + 4 * 100),
        ("all_gather", "out", 100 + 4 * 100),
        ("all_gather", "in", 100 + 4 * 75),
        ("reduce_scatter", "out", 4 * 100 + 100),
        ("all_to_all", "out", 2 * 4 * 100),
        ("gather", "out", 200),
        ("scatter", "out", 200),
        ("send_recv", "out", 2 * 4 * 100),
        ("barrier", "out", 0),
    ],
)
def test_bytes_that_must_be_moved(collective: str, place: str, nbytes: int) -> None:
    assert bound_nbytes(collective, 100 if collective != "barrier" else 0, 4, place) == nbytes


def test_counts_are_rounded_down_but_never_nothing() -> None:
    assert block_count("all_reduce", 18, 4, 4) == 4
    assert block_count("all_gather", 63, 4, 4) == 3
    assert block_count("all_to_all", 1, 8, 4) == 1
    assert block_count("barrier", 100, 4, 4) == 0


def walk(rank: int, world_size: int, spoil: bool) -> dict[str, int]:
    """Wrong elements of every call at two sizes and places, on this rank; ``spoil`` changes one before counting."""
    found = {}
    for collective in COLLECTIVES:
        for place in ("in", "out") if collective in IN_PLACE else ("out",):
            for nbytes in (1, 300_000):
                settings = Settings(
                    ranks=world_size,
                    place=place,
                    root=1,
                    op="sum",
                    asynchronous=nbytes == 1,
                    memory=("ordinary", "shared")[nbytes % 2],
                )
                case = Case(settings, collective, nbytes, rank, Tables(world_size, torch.float32, "sum"))
                case.fill()
                caller = TorchCaller()
                caller.call(case, settings.asynchronous)()
                if spoil and len(case.output):
                    case.output[-1] += 1
                found[f"{collective} {place} {nbytes}"] = case.wrong(caller.output(case))
    return found


def test_right_results_are_found_right_and_wrong_ones_wrong() -> None:
    right = ranks(3).run(walk, False)
    assert {name: count for found in right for name, count in found.items() if count} == {}
    for rank, found in enumerate(ranks(3).run(walk, True)):
        for name, count in found.items():
            rooted = name.startswith(("reduce ", "gather"))
            assert count == (0 if name.startswith("barrier") or (rooted and rank != 1) else 1), (rank, name)

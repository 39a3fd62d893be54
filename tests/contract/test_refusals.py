"""What cannot be done is refused on every rank with a reason, changes no tensor, and leaves the group usable."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from contract.values import reduce_op
from ranks import ranks
from unisono.errors import UsageError

SUM = dist.ReduceOp.SUM


def overlapping(count: int = 4) -> torch.Tensor:
    """Return a tensor all of whose rows are the same memory."""
    return torch.ones(1, 3).expand(count, 3)


def reductions(x: torch.Tensor, op: dist.ReduceOp) -> dict[str, Callable[[], object]]:
    """Every call that reduces x by op."""
    size = dist.get_world_size()
    return {
        "all_reduce": lambda: dist.all_reduce(x.clone(), op),
        "all_reduce async": lambda: dist.all_reduce(x.clone(), op, async_op=True).wait(),
        "reduce": lambda: dist.reduce(x.clone(), 0, op),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty_like(x), [x] * size, op),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty_like(x), torch.cat([x] * size), op),
    }


def into_overlapping() -> dict[str, Callable[[], object]]:
    """Every call with a result whose elements share memory."""
    size, x = dist.get_world_size(), torch.ones(4, 3)
    rank = dist.get_rank()
    wide = torch.ones(4 * size, 3)
    return {
        "broadcast": lambda: dist.broadcast(overlapping(), 0),
        "all_reduce": lambda: dist.all_reduce(overlapping()),
        "reduce": lambda: dist.reduce(overlapping(), 0),
        "gather": lambda: dist.gather(x, [overlapping() for _ in range(size)] if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(overlapping(), [x] * size if rank == 0 else None, 0),
        "all_gather": lambda: dist.all_gather([overlapping() for _ in range(size)], x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(overlapping(4 * size), x),
        "reduce_scatter": lambda: dist.reduce_scatter(overlapping(), [x] * size),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(overlapping(), wide),
        "all_to_all": lambda: dist.all_to_all([overlapping() for _ in range(size)], [x] * size),
        "all_to_all_single": lambda: dist.all_to_all_single(overlapping(4 * size), wide),
    }


def messages(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    """Make every call; return what each raised, after a sum that shows the group still works."""
    seen = {}
    for name, call in calls.items():
        try:
            call()
            seen[name] = "no error"
        except (RuntimeError, ValueError) as error:  # torch itself refuses some calls with a ValueError
            seen[name] = f"{type(error).__name__}: {error}"
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.eq(dist.get_world_size()).all(), f"after {name} the group gives {total}"
    return seen


def refused_ops(rank: int, world_size: int, op: str, dtype: torch.dtype) -> dict[str, str]:
    return messages(reductions(torch.ones(4, dtype=dtype), reduce_op(op)))


def refused_results(rank: int, world_size: int) -> dict[str, str]:
    return messages(into_overlapping())


def one_rank_overlaps(rank: int, world_size: int) -> dict[str, str]:
    """Only the last rank passes a result that cannot be written."""
    mine = overlapping() if rank == world_size - 1 else torch.ones(4, 3)
    return messages({"all_reduce": lambda: dist.all_reduce(mine)})


def sizes_that_do_not_fit(rank: int, world_size: int) -> dict[str, str]:
    wide = torch.ones(4 * world_size + 1)
    return messages(
        {
            "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(wide, torch.ones(4)),
            "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.ones(4), wide),
            "all_to_all_single": lambda: dist.all_to_all_single(wide, wide.clone(), [4] * world_size, [4] * world_size),
            "all_gather": lambda: dist.all_gather([torch.ones(3)] * (world_size + 1), torch.ones(3)),
            "reduce_scatter": lambda: dist.reduce_scatter(torch.ones(3), [torch.ones(3)] * (world_size + 1)),
            "reduce_scatter, other shape": lambda: dist.reduce_scatter(torch.ones(2), [torch.ones(3)] * world_size),
        }
    )


def shared_outputs(rank: int, world_size: int, compiled: bool) -> dict[str, str]:
    """Outputs that are one tensor, or overlap; lists of one shape go by compiled loops, others do not."""
    x, one, wide = torch.ones(3), torch.zeros(3), torch.zeros(2 * world_size + 1)
    if not compiled:
        x, one, wide = (torch.stack([t, t], dim=1)[:, 0] for t in (x, one, wide))
    several = [x] * world_size
    steps = [wide[2 * r : 2 * r + 3] for r in range(world_size)]
    return messages(
        {
            "all_gather": lambda: dist.all_gather([one] * world_size, x),
            "all_gather, async": lambda: dist.all_gather([one] * world_size, x, async_op=True).wait(),
            "all_gather, steps": lambda: dist.all_gather(steps if compiled else [one] * world_size, x),
            "all_to_all": lambda: dist.all_to_all([one] * world_size, several),
            "gather": lambda: dist.gather(x, [one] * world_size if rank == 0 else None, 0),
        }
    )


def outputs_side_by_side(rank: int, world_size: int) -> list[list[float]]:
    """Columns of one tensor lie between each other and share nothing."""
    whole = torch.zeros(3, world_size)
    dist.all_gather(list(whole.unbind(1)), torch.full((3,), float(rank)))
    return whole.tolist()


def ranks_that_are_not_there(rank: int, world_size: int, no_rank: int) -> dict[str, str]:
    x = torch.ones(3)
    lists = [torch.ones(3) for _ in range(world_size)]
    return messages(
        {
            "broadcast": lambda: dist.broadcast(x, group_src=no_rank),
            "broadcast of a global rank": lambda: dist.broadcast(x, no_rank),
            "broadcast async": lambda: dist.broadcast(x, group_src=no_rank, async_op=True).wait(),
            "broadcast, strided": lambda: dist.broadcast(torch.ones(4, 2)[:, 0], group_src=no_rank),
            "reduce": lambda: dist.reduce(x, group_dst=no_rank),
            "gather": lambda: dist.gather(x, None, group_dst=no_rank),
            "scatter": lambda: dist.scatter(x, None, group_src=no_rank),
            "gather into lists": lambda: dist.group.WORLD.gather([lists], [x], gather_options(no_rank)).wait(),
            "send": lambda: dist.send(x, group_dst=no_rank),
            "isend": lambda: dist.isend(x, group_dst=no_rank).wait(),
            "recv": lambda: dist.recv(x, group_src=no_rank),
            "irecv": lambda: dist.irecv(x, group_src=no_rank).wait(),
        }
    )


def gather_options(root: int) -> dist.GatherOptions:
    options = dist.GatherOptions()
    options.rootRank = root
    return options


def global_rank_as_group_rank(rank: int, world_size: int) -> str:
    group = dist.new_group([0, 2])
    if rank == 1:
        return ""
    with pytest.raises(UsageError) as caught:
        dist.broadcast(torch.ones(3), group=group, group_src=2)
    return str(caught.value)


several = pytest.mark.parametrize("world_size", [1, 2, 3], indirect=True)
MEANINGLESS = [
    ("AVG", torch.bool, "AVG"),
    ("PREMUL_SUM", torch.int32, "PREMUL_SUM"),
    ("PREMUL_SUM", torch.bool, "PREMUL_SUM"),
    ("BAND", torch.float32, "BAND"),
    ("BOR", torch.bfloat16, "BOR"),
    ("BXOR", torch.float64, "BXOR"),
]


@several
@pytest.mark.parametrize(("op", "dtype", "word"), MEANINGLESS)
def test_reductions_without_meaning(world_size: int, op: str, dtype: torch.dtype, word: str) -> None:
    for seen in ranks(world_size).run(refused_ops, op, dtype):
        for name, message in seen.items():
            assert message.startswith("UsageError"), f"{name}: {message}"
            assert word in message, f"{name} does not name the op: {message}"
            assert str(dtype).removeprefix("torch.") in message, f"{name} does not name the dtype: {message}"


@several
@pytest.mark.parametrize("op", ["MIN", "MAX", "BAND"])
def test_complex_numbers_have_no_order(world_size: int, op: str) -> None:
    for seen in ranks(world_size).run(refused_ops, op, torch.complex64):
        assert [name for name, message in seen.items() if message == "no error"] == []


@several
def test_overlapping_results(world_size: int) -> None:
    """A rank that would write is refused by itself; one whose tensor is only read hears of it from the others."""
    reads_only = {"broadcast": [0], "reduce": range(1, world_size), "gather": range(1, world_size)}
    for rank, seen in enumerate(ranks(world_size).run(refused_results)):
        for name, message in seen.items():
            if rank not in reads_only.get(name, []):
                assert message.startswith("UsageError"), f"{name}: {message}"
            elif world_size > 1:
                assert message.startswith(("UsageError", "MismatchError")), f"{name}: {message}"


@pytest.mark.parametrize("world_size", [2, 3], indirect=True)
def test_one_rank_with_an_overlapping_result_stops_all(world_size: int) -> None:
    *others, last = ranks(world_size, group_timeout=10).run(one_rank_overlaps)
    assert last["all_reduce"].startswith("UsageError")
    for seen in others:
        assert seen["all_reduce"].startswith(("UsageError", "MismatchError")), seen["all_reduce"]


@several
def test_sizes_that_do_not_fit(world_size: int) -> None:
    for seen in ranks(world_size).run(sizes_that_do_not_fit):
        assert [name for name, message in seen.items() if not message.startswith(("UsageError", "ValueError"))] == []


@pytest.mark.parametrize("compiled", [True, False])
def test_outputs_that_share_memory_with_each_other(compiled: bool) -> None:
    first, *others = ranks(3, group_timeout=10).run(shared_outputs, compiled)
    for name, text in first.items():
        assert text.startswith("UsageError"), f"{name}: {text}"
        assert "share memory" in text
        assert all("share memory" in seen[name] for seen in others)


def test_outputs_that_lie_between_each_other() -> None:
    assert ranks(3).run(outputs_side_by_side) == [[[0.0, 1.0, 2.0]] * 3] * 3


@several
@pytest.mark.parametrize("no_rank", [-1, -4, 7])
def test_ranks_that_are_not_there(world_size: int, no_rank: int) -> None:
    for rank, seen in enumerate(ranks(world_size).run(ranks_that_are_not_there, no_rank)):
        words = f"on rank {rank}: there is no group rank {no_rank} in a group of {world_size} rank"
        ops = {name: name.split(" ")[0].strip(",").removeprefix("i") for name in seen}
        wrong = {name: m for name, m in seen.items() if not m.startswith(f"UsageError: {ops[name]} {words}")}
        assert wrong == {}


def test_a_global_rank_given_as_a_group_rank() -> None:
    for text in ranks(3).run(global_rank_as_group_rank)[::2]:
        assert "2 is a global rank: give it as src or dst, or 1 as group_src or group_dst" in text

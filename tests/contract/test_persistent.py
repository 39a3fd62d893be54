"""Calls that are prepared once: their values, beside torch's functions on the peers, and what they refuse."""

import datetime
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono
from contract import reference
from contract.values import data, reduce_op, same_bytes
from hangs.job import Fault, attempt
from ranks import ranks
from unisono.torch_names import all_gather_single, reduce_scatter_single

SIZES = (1, 1000, 70_001)
ROUNDS = 3
Tensors = list[torch.Tensor]


def values(collective: str, dtype: torch.dtype, numel: int, world_size: int, turn: int, op: str) -> Tensors:
    """What every rank puts in, the ``turn``-th time."""
    pieces = world_size if collective in ("reduce_scatter", "all_to_all") else 1
    return [data(dtype, numel * pieces, 100 * turn + rank, op) for rank in range(world_size)]


def wanted(collective: str, rank: int, inputs: Tensors, op: str, root: int) -> torch.Tensor:
    """What rank ``rank``'s output shall hold."""
    n = len(inputs)
    match collective:
        case "all_reduce":
            return reference.reduce(op, inputs)
        case "reduce":
            return reference.reduce(op, inputs) if rank == root else inputs[rank]
        case "broadcast":
            return inputs[root]
        case "all_gather":
            return torch.cat(inputs)
        case "reduce_scatter":
            return reference.reduce(op, inputs).chunk(n)[rank]
    return torch.cat([each.chunk(n)[rank] for each in inputs])


def by_torch(collective: str, output: torch.Tensor, source: torch.Tensor, op: str, root: int) -> Callable[[], object]:
    """The same call by torch's function."""
    reducing = {"op": reduce_op(op)} if op else {}
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(output, **reducing),
        "reduce": lambda: dist.reduce(output, root, **reducing),
        "broadcast": lambda: dist.broadcast(output, root),
        "all_gather": lambda: all_gather_single(output, source),
        "reduce_scatter": lambda: reduce_scatter_single(output, source, **reducing),
        "all_to_all": lambda: dist.all_to_all_single(output, source),
    }
    return calls[collective]


IN_PLACE = ("all_reduce", "reduce", "broadcast")
COLLECTIVES = (*IN_PLACE, "all_gather", "reduce_scatter", "all_to_all")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")


def made(rank: int, world_size: int, collective: str, mixed: bool) -> list[str]:
    """Each call several times with other contents, at once or by start and wait; ``mixed``: the peers by torch."""
    problems = []
    for k, numel in enumerate(SIZES):
        dtype, op = ((torch.float32, "SUM"), (torch.int64, "MAX"), (torch.bfloat16, "PRODUCT"))[k]
        op, root = op if collective in REDUCING else "", (k + 1) % world_size
        source = torch.empty_like(values(collective, dtype, numel, world_size, 0, op)[rank])
        output = source if collective in IN_PLACE else torch.empty_like(wanted(
            collective, rank, values(collective, dtype, numel, world_size, 0, op), op, root
        ))  # fmt: skip
        tensors = (output,) if collective in IN_PLACE else (output, source)
        call: Any = by_torch(collective, output, source, op, root)
        prepared = not mixed or rank % 2 == k % 2
        if prepared:
            reducing = {"op": reduce_op(op)} if op else {}
            call = unisono.prepare(collective, *tensors, root=root, **reducing)
        for turn in range(ROUNDS):
            inputs = values(collective, dtype, numel, world_size, turn, op)
            source.copy_(inputs[rank])
            if prepared and turn % 2:
                call.start()
                call.wait()
            else:
                call()
            if not same_bytes(output, wanted(collective, rank, inputs, op, root)):
                problems.append(f"{collective} of {numel} {dtype} by {op}, the {turn}th time")
            if output is not source and not same_bytes(source, inputs[rank]):
                problems.append(f"{collective} of {numel} {dtype} has changed its input")
    return problems


@pytest.mark.parametrize("world_size", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_values_of_every_collective(world_size: int, collective: str) -> None:
    pool = ranks(world_size)
    assert pool.run(made, collective, False) == [[]] * world_size
    assert pool.run(made, collective, True) == [[]] * world_size


def barriers(rank: int, world_size: int) -> tuple[float, float]:
    """Rank 0 comes late to both; how long each took."""
    call, took = unisono.prepare("barrier"), []
    for way in (call, lambda: (call.start(), call.wait())):
        dist.barrier()
        begun = time.monotonic()
        if rank == 0:
            time.sleep(0.1)
        way()
        took.append(time.monotonic() - begun)
    return took[0], took[1]


def test_a_barrier() -> None:
    for took in ranks(2).run(barriers):
        assert min(took) > 0.09


def in_place(rank: int, world_size: int) -> tuple[list[list[float]], list[str]]:
    """Where torch allows it the input is the output, or its own piece of it; no other overlap is taken."""
    gathered, whole, pieces = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    part = whole[2 * rank : 2 * rank + 2]
    calls = [
        unisono.prepare("all_gather", gathered, gathered[2 * rank : 2 * rank + 2]),
        unisono.prepare("reduce_scatter", part, whole),
        unisono.prepare("all_to_all", pieces, pieces),
    ]
    for _ in range(2):
        gathered.zero_()[2 * rank : 2 * rank + 2] = rank + 1.0
        whole.fill_(rank + 1.0)
        pieces.copy_(torch.arange(4.0) + 10 * rank)
        for call in calls:
            call()
    across = [
        attempt(lambda: unisono.prepare("all_gather", gathered, gathered[1:3])).kind,
        attempt(lambda: unisono.prepare("reduce_scatter", whole[1:3], whole)).kind,
        attempt(lambda: unisono.prepare("all_to_all", whole[:2], whole[1:3])).kind,
    ]
    return [gathered.tolist(), part.tolist(), pieces.tolist()], across


def test_outputs_that_share_memory_with_inputs() -> None:
    (first, across), (second, elsewhere) = ranks(2).run(in_place)
    assert across == elsewhere == ["UsageError"] * 3
    assert first == [[1.0, 1.0, 2.0, 2.0], [3.0, 3.0], [0.0, 1.0, 10.0, 11.0]]
    assert second == [[1.0, 1.0, 2.0, 2.0], [3.0, 3.0], [2.0, 3.0, 12.0, 13.0]]


def under_way(rank: int, world_size: int) -> tuple[list[float], bool, list[Fault]]:
    """Started, the others late: nobody blocks in start; waits that are cut short, starts that come too early."""
    x, y = torch.ones(50_000), torch.full((3,), 2.0)
    call, faults = unisono.prepare("all_reduce", x), []
    faults.append(attempt(call.wait))
    if rank == 1:
        time.sleep(0.3)
    begun = time.monotonic()
    call.start()
    prompt = time.monotonic() - begun < 0.2
    faults.append(attempt(call.start))
    faults.append(attempt(lambda: call.wait(0.02)) if rank == 0 else Fault("CollectiveTimeout", "rank 1", 0.0, 0.0))
    dist.all_reduce(y)  # in between
    call.wait()
    faults.append(attempt(call.wait))
    call()
    return [x[0].item(), x[-1].item(), y[0].item()], prompt, faults


def test_start_and_wait() -> None:
    for found, prompt, (early, twice, late, again) in ranks(2, group_timeout=27.0).run(under_way):
        assert found == [4.0, 4.0, 4.0]
        assert prompt
        for fault in (early, again):
            fault.says(
                "UsageError", r"^<persistent all_reduce\(float32 \[50000\], SUM\)> has not been started: call st"
            )
        twice.says(
            "UsageError", r"^<persistent all_reduce.*> has been started and not waited for: call wait\(\) first$"
        )
        late.says("CollectiveTimeout", "rank 1")


def behind_others(rank: int, world_size: int) -> list[list[float]]:
    """The queue is busy with asynchronous calls that wait for the last rank: prepared ones queue, in order."""
    big, x, y = torch.ones(300_000), torch.full((5,), 1.0), torch.full((70_000,), 3.0)
    first, second = unisono.prepare("all_reduce", x), unisono.prepare("all_reduce", y)
    dist.barrier()
    if rank == world_size - 1:
        time.sleep(0.15)
    works = [dist.all_reduce(big, async_op=True) for _ in range(3)]
    second.start()
    first()
    works.append(dist.all_reduce(x, async_op=True))
    first.start()
    for work in reversed(works):
        work.wait()
    first.wait()
    second.wait()
    return [t[[0, -1]].tolist() for t in (big, x, y)]


@pytest.mark.parametrize("world_size", [2, 3], indirect=True)
def test_while_the_lane_is_busy(world_size: int) -> None:
    n = float(world_size)
    assert ranks(world_size).run(behind_others) == [[[n**3] * 2, [n**3] * 2, [3 * n] * 2]] * world_size


def disagreeing(rank: int, world_size: int) -> tuple[list[Fault], list[float]]:
    """Rank 1 calls something else; the group and the object go on."""
    x, other = torch.full((4,), 1.0), torch.zeros(4)
    call, faults = unisono.prepare("all_reduce", x), []

    def differs() -> None:
        dist.all_reduce(other, dist.ReduceOp.MAX)

    def begins() -> None:
        call.start()
        call.wait()

    faults.append(attempt(differs if rank else call))
    call()
    faults.append(attempt(differs if rank else begins))
    call.start()
    call.wait()
    return faults, x.tolist()


def test_a_mismatch_is_named_and_the_object_stays_usable() -> None:
    for faults, found in ranks(2, group_timeout=26.0).run(disagreeing):
        for fault in faults:
            fault.says("MismatchError", r"rank 0: all_reduce\(float32 \[4\], SUM\)", r"rank 1: .*MAX\)", "test_persis")
        assert found == [4.0] * 4


def wrong_uses(rank: int, world_size: int) -> list[str]:
    """What `prepare` says of arguments that do not suit; it asks no peer."""
    x, truths = torch.ones(4), torch.ones(4, dtype=torch.bool)
    strided, premul, six = torch.ones(4, 2)[:, 0], dist._make_nccl_premul_sum(2.0), torch.ones(6)
    gloo = dist.new_group(backend="gloo")
    said = [
        attempt(lambda: unisono.prepare("gather", x)),
        attempt(lambda: unisono.prepare("all_reduce")),
        attempt(lambda: unisono.prepare("all_reduce", x, x)),
        attempt(lambda: unisono.prepare("all_gather", x)),
        attempt(lambda: unisono.prepare("barrier", x)),
        attempt(lambda: unisono.prepare("all_reduce", strided)),
        attempt(lambda: unisono.prepare("all_reduce", torch.ones(0))),
        attempt(lambda: unisono.prepare("all_reduce", x.to("meta"))),
        attempt(lambda: unisono.prepare("all_reduce", x, op=dist.ReduceOp.BAND)),
        attempt(lambda: unisono.prepare("all_reduce", truths, op=dist.ReduceOp.AVG)),
        attempt(lambda: unisono.prepare("all_reduce", x, op=premul)),
        attempt(lambda: unisono.prepare("broadcast", x, root=world_size)),
        attempt(lambda: unisono.prepare("all_gather", torch.ones(4 * world_size + 1), x)),
        attempt(lambda: unisono.prepare("all_gather", torch.ones(4 * world_size, dtype=torch.int64), x)),
        attempt(lambda: unisono.prepare("reduce_scatter", x, torch.ones(4))),
        attempt(lambda: unisono.prepare("all_to_all", torch.ones(3), torch.ones(3))),
        attempt(lambda: unisono.prepare("all_to_all", six[:4], six[2:])),
        attempt(lambda: unisono.prepare("all_reduce", x, group=gloo)),
    ]
    dist.barrier()  # Gloo may still be connecting on the other rank
    dist.destroy_process_group(gloo)
    return [f"{fault.kind}: {fault.text}" for fault in said]


REFUSALS = [
    "UsageError: prepare knows all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, barrier, not 'ga",
    "UsageError: prepare all_reduce takes 1 tensor, got 0",
    "UsageError: prepare all_reduce takes 1 tensor, got 2",
    "UsageError: prepare all_gather takes 2 tensors, got 1",
    "UsageError: prepare barrier takes 0 tensors, got 1",
    "UsageError: prepare all_reduce: the tensor float32 [4] has strides [2]: give a contiguous one, and copy",
    "UsageError: prepare all_reduce: the tensor float32 [0] is empty: leave the call out on all ranks",
    "UsageError: prepare all_reduce: the tensor float32 [4] is on meta: unisono carries CPU tensors; move it",
    "UsageError: prepare all_reduce: BAND is not defined for float32: ",
    "UsageError: prepare all_reduce: AVG is not defined for bool: ",
    "UsageError: prepare all_reduce: PREMUL_SUM multiplies a copy of its input; multiply, then use SUM",
    "UsageError: prepare broadcast",
    "UsageError: prepare all_gather: the output needs as many elements as the inputs of all 2 ranks together, of",
    "UsageError: prepare all_gather: the output needs as many elements as the inputs of all 2 ranks together, of",
    "UsageError: prepare reduce_scatter: the input needs 2 times the elements of the output, of its dtype, got",
    "UsageError: prepare all_to_all: output and input must be two tensors of one dtype and shape, whose first dim",
    "UsageError: prepare all_to_all: output and input share memory otherwise than torch.distributed allows in place: ",
    "UsageError: prepare needs a group of backend unisono, not gloo",
]


def test_wrong_uses_are_refused_in_one_line() -> None:
    for said in ranks(2).run(wrong_uses):
        assert len(said) == len(REFUSALS)
        for words, beginning in zip(said, REFUSALS, strict=True):
            assert words.startswith(beginning)
            assert "\n" not in words


def left(rank: int, world_size: int, path: str) -> list[Fault]:
    """After its group is gone: every way of using it says so."""
    dist.init_process_group("unisono", f"file://{path}", rank=rank, world_size=world_size)
    x, idle = torch.ones(3), torch.ones(2)
    call, other = unisono.prepare("all_reduce", x), unisono.prepare("all_reduce", idle)
    call()
    dist.barrier()
    if rank == 0:
        other.start()
    dist.destroy_process_group()
    found = [attempt(call), attempt(call.start), attempt(call.wait), attempt(lambda: unisono.prepare("barrier"))]
    if rank == 0:
        found.append(attempt(other.wait))
    return [*found, attempt(lambda: repr(call))]


def test_after_the_group_is_destroyed(tmp_path: Path) -> None:
    first, second = ranks(2, group=False).run(left, str(tmp_path / "meeting"))
    ended = r"the default group can not be used any more: this rank has left the group \(destroy_process_group\)"
    for called, started, waited, prepared, *_, told in (first, second):
        called.says("UsageError", ended)
        started.says("UsageError", ended)
        waited.says("UsageError", "has not been started")
        prepared.says("ValueError", "not been initialized")
        assert told.text == "'<persistent all_reduce(float32 [3], SUM)>'"
    first[4].says("UnisonoError", r"has left the group \(destroy_process_group\) while the call was under way")


def group_of_its_own(rank: int, world_size: int) -> list[float]:
    """A subgroup that no call has joined yet; the root counts within it."""
    group = dist.new_group([1, 2])
    x = torch.full((2,), float(rank))
    if rank:
        unisono.prepare("broadcast", x, root=1, group=group)()
    dist.barrier()
    dist.destroy_process_group(group)
    return x.tolist()


def test_a_group_of_its_own() -> None:
    assert ranks(3).run(group_of_its_own) == [[0.0, 0.0], [2.0, 2.0], [2.0, 2.0]]


def changes(rank: int, world_size: int, path: str) -> tuple[list[float], bool, list[str]]:
    """Loops come later, on rank 0 in the midst of a block that chooses an algorithm: the same calls are made on."""
    os.environ["UNISONO_FUSED"] = "0"
    dist.init_process_group("unisono", f"file://{path}", rank=rank, world_size=world_size)
    queue = dist.distributed_c10d._get_default_group()._group.collectives
    x, y = torch.ones(1000), torch.ones(1000)
    call = unisono.prepare("all_reduce", x)
    with unisono.algorithm("double_tree"):
        named = unisono.prepare("all_reduce", y)
    call(), named()
    before, words = call._part[0].run, [repr(call), repr(named)]
    queue.preparer._mode = 2  # as if they were wanted at once
    queue.preparer.notify()
    call(), named()
    if rank == 0:
        with unisono.algorithm("ring"):
            queue.preparer.notify()
    call(), named()
    call.start()
    queue.preparer.notify()
    call.wait(), named()
    changed = call._part[0].run is not before
    words += [repr(call), repr(named)]
    dist.destroy_process_group()
    return [x[0].item(), y[-1].item()], changed, words


def test_loops_that_arrive_later(tmp_path: Path) -> None:
    words = [
        "<persistent all_reduce(float32 [1000], SUM)>",
        "<persistent all_reduce(float32 [1000], SUM, by double_tree)>",
    ]
    for found, changed, told in ranks(2, group=False).run(changes, str(tmp_path / "meeting")):
        assert found == [16.0, 16.0]
        assert changed
        assert [word.replace(" by", ", by").replace(",,", ",") for word in told] == words * 2


def peer_is_late(rank: int, world_size: int) -> list[Fault]:
    """The group's timeout counts for a prepared call, and the group is at its end then."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=0.2))
    call = unisono.prepare("all_reduce", torch.ones(3), group=group)
    call()
    if rank:
        time.sleep(0.5)
    found = [attempt(call), attempt(call.start)] if rank == 0 else []
    dist.barrier()
    dist.destroy_process_group(group)
    return found


def test_a_timeout() -> None:
    (first, again), _ = ranks(2).run(peer_is_late)
    first.says("CollectiveTimeout", r"all_reduce\(float32 \[3\], SUM\), call no\. 2 of", "rank 1 missing")
    assert 0.15 < first.seconds < 2.0
    again.says("CollectiveTimeout", "failed before and can only be destroyed")

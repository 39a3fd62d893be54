"""Calls on several tensors, with CPU tensors: what kernels are given of lists, what is packed of coalesced calls."""

import ctypes
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

import unisono
from ranks import ranks
from unisono.backend import device_calls, device_work
from unisono.backend.cuda_calls import KNOWN_AGAIN
from unisono.backend.device_calls import DeviceCalls
from unisono.backend.device_lists import LISTED, FlatCall, ListCall, flat_call, list_call
from unisono.backend.inner import Inner
from unisono.backend.work import DONE
from unisono.errors import UsageError
from unisono.gpu.defaults import TABLE
from unisono.gpu.kernels import ITEMSIZES, GpuCall

N, ROOT = 3, 1
OPTIONS = SimpleNamespace(reduceOp=ReduceOp.SUM, rootRank=ROOT, asyncOp=False)


def tensors(rank: int, *shapes: Sequence[int]) -> list[torch.Tensor]:
    """Of every shape one, of numbers that no other rank has."""
    chance = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 1000, tuple(shape), generator=chance).float() for shape in shapes]


def made(name: str, arguments: Sequence[Sequence[Any]]) -> list[FlatCall]:
    found = [flat_call(name, [*given, OPTIONS], N) for given in arguments]
    assert all(call is not None for call in found)
    return [call for call in found if call is not None]


def run(name: str, arguments: Sequence[Sequence[Any]]) -> list[FlatCall]:
    """Makes the call of all ranks: packs, does on one tensor what a kernel does, delivers."""
    calls = made(name, arguments)
    packed = [call.pack() for call in calls]
    single = calls[0].name
    assert {call.name for call in calls} == {single}
    if single == "allreduce":
        total = torch.stack([flat[0][0] for flat in packed]).sum(0)
        for flat in packed:
            flat[0][0].copy_(total)
    else:
        sources = [flat[1].reshape(-1).clone() for flat in packed]
        for rank, (flat, source) in enumerate(zip(packed, sources, strict=True)):
            count = source.numel() // N
            if single == "all_gather_single":
                flat[0].view(-1).copy_(torch.cat(sources))
            else:
                flat[0].copy_(torch.stack(sources).sum(0)[rank * count : (rank + 1) * count])
    for call, flat in zip(calls, packed, strict=True):
        call.deliver(flat)
    return calls


def given(name: str, outputs: Sequence[Any], inputs: Sequence[Any], rank: int = ROOT) -> ListCall | None:
    return list_call(name, [outputs, inputs, OPTIONS], rank, N)


def test_lists_are_taken_where_they_are() -> None:
    x, *outs = tensors(0, *[(2, 5)] * (N + 1))
    for name, rank, root in (("allgather", 0, 0), ("gather", ROOT, ROOT)):
        call = given(name, [outs], [x], rank)
        assert call is not None
        assert call.shape == GpuCall(LISTED[name], "int32", 10, "", root, listed=True)
        assert (call.inputs, call.outputs, call.as_they_are) == ([x], outs, True)
    call = given("scatter", [x], [outs])
    assert call is not None
    assert (call.inputs, call.outputs, call.shape.collective) == (outs, [x], "scatter")
    call = given("reduce_scatter", [x], [outs])
    assert call is not None
    assert (call.inputs, call.outputs) == (outs, [x])
    assert call.shape == GpuCall("reduce_scatter", "float32", 10, "SUM", listed=True)


def test_ranks_that_are_not_the_root_have_no_list() -> None:
    x, *outs = tensors(0, *[(2, 5)] * (N + 1))
    for lists in ([outs], []):
        gathered, scattered = given("gather", lists, [x], 0), given("scatter", [x], lists, 0)
        assert gathered is not None
        assert scattered is not None
        assert (gathered.inputs, len(gathered.outputs)) == ([x], 0)
        assert (len(scattered.inputs), scattered.outputs) == (0, [x])


def test_tensors_with_gaps_and_tensors_that_overlap_are_copied() -> None:
    whole, x = torch.zeros(40), torch.ones(10)
    for outs, fine in (
        (list(whole[:30].split(10)), True),
        (list(whole[:30].view(10, 3).unbind(1)), False),
        ([whole[:10], whole[5:15], whole[20:30]], False),
    ):
        call = given("allgather", [outs], [x])
        assert call is not None
        assert call.as_they_are is fine
    own = given("allgather", [list(whole[:30].split(10))], [whole[10:20]])
    assert own is not None
    assert own.as_they_are


def test_coalesced_calls() -> None:
    shapes = [(3,), (2, 2), (7, 1)]
    lists = [tensors(rank, *shapes) for rank in range(N)]
    totals = [sum(xs[k] for xs in lists) for k in range(len(shapes))]
    ours = [[x.clone() for x in xs] for xs in lists]
    run("allreduce_coalesced", [(xs,) for xs in ours])
    assert all(torch.equal(x, total) for xs in ours for x, total in zip(xs, totals, strict=True))
    gathered = [[torch.zeros(N * shape[0], *shape[1:]) for shape in shapes] for _ in range(N)]
    run("all_gather_single_coalesced", list(zip(gathered, lists, strict=True)))
    wanted = [torch.cat([xs[k] for xs in lists]) for k in range(len(shapes))]
    assert all(torch.equal(x, want) for outs in gathered for x, want in zip(outs, wanted, strict=True))
    rows = [[[torch.zeros(shape) for shape in shapes] for _ in range(N)] for _ in range(N)]
    run("allgather_coalesced", list(zip(rows, lists, strict=True)))
    assert all(torch.equal(rows[r][i][k], lists[i][k]) for r in range(N) for i in range(N) for k in range(len(shapes)))
    parts = [[torch.zeros(shape) for shape in shapes] for _ in range(N)]
    inputs = [tensors(rank, *[(N * shape[0], *shape[1:]) for shape in shapes]) for rank in range(N)]
    run("reduce_scatter_single_coalesced", list(zip(parts, inputs, strict=True)))
    for k, shape in enumerate(shapes):
        whole = sum(xs[k] for xs in inputs).chunk(N)  # type: ignore[union-attr]
        assert all(torch.equal(parts[rank][k].view(shape), whole[rank]) for rank in range(N))


def test_memory_that_lies_side_by_side_is_used_where_it_is() -> None:
    whole = torch.zeros(N, 4)
    call = made("allreduce_coalesced", [(list(whole),)] * N)[0]
    assert call.pack()[0][0].data_ptr() == whole.data_ptr()
    apart = [whole[0], whole[2], whole[1]]
    assert made("allreduce_coalesced", [(apart,)] * N)[0].pack()[0][0].data_ptr() != whole.data_ptr()


def test_what_stays_with_nccl() -> None:
    x, y = torch.ones(4), torch.ones(5)
    assert given("allgather", [[x, x, y]], [x]) is None
    assert given("allgather", [[x.double()] * N], [x]) is None
    assert given("allgather", [[x[:0]] * N], [x[:0]]) is None
    assert given("reduce_scatter", [x.to(torch.uint8)], [[x.to(torch.uint8)] * N]) is None
    assert list_call("gather", [[[x] * N], [x], OPTIONS, None], ROOT, N) is None
    assert [given(name, [], []) for name in LISTED] == [None] * len(LISTED)
    assert flat_call("allreduce_coalesced", [[x, x.double()], OPTIONS], N) is None
    assert flat_call("allreduce_coalesced", [[x.to(torch.uint8)], OPTIONS], N) is None
    assert flat_call("alltoall", [[x] * N, [x] * N, OPTIONS], N) is None
    assert flat_call("allreduce", [[x], OPTIONS], N) is None


def test_lists_of_the_root_that_do_not_fit() -> None:
    x, y = torch.ones(4), torch.ones(5)
    with pytest.raises(
        UsageError, match=r"gather on GPUs needs outputs alike, 3 of 4 elements of float32, not float32 "
    ):
        given("gather", [[y, x, x]], [x])
    with pytest.raises(UsageError, match=r"scatter on GPUs needs inputs alike, 3 of 4 elements of float32, not none"):
        given("scatter", [x], [])


# Through a group's calls, with a kernel that is a copy.


def stand_in(group: Any, launched: list[str]) -> Any:
    """The calls on GPUs of a group of one rank, whose kernels copy, and whose NCCL is noted; the stream is always 0."""
    device_calls.raw_stream = device_work.raw_stream = lambda index: 0
    calls: Any = DeviceCalls(group, None, timedelta(seconds=5), True, torch.device("cpu"))

    def prepare(shape: Any, header: int, aligned: bool) -> Any:
        def copy(stream: int, source: int, target: int) -> None:
            launched.append(shape.collective)
            ctypes.memmove(target, source, shape.count * ITEMSIZES[shape.dtype])

        return copy

    calls._inner = SimpleNamespace(call=lambda name, *_: launched.append(f"nccl {name}") or DONE)
    workspace = SimpleNamespace(failure=lambda: None)
    calls.kernels = SimpleNamespace(table=TABLE, prepare=prepare, schedule=lambda call: True, workspace=workspace)
    calls._checked = lambda name, arguments: torch.device("cpu")
    calls._failed, calls._last.stream = [0], 0
    return calls


def through_a_group(rank: int, world_size: int) -> list[tuple[str, bool, list[str]]]:
    """Of each form: its name, whether the values are right, and what carried them."""
    launched: list[str] = []
    ours: Any = dist.group.WORLD
    calls, found = stand_in(ours._group, launched), []
    for name, kind in FORMS.items():
        for x in (torch.randn(5, 4), torch.randn(4, 6).t()):
            out, want = torch.empty_like(x), x.clone()
            arguments = {
                "reduce": ([out.copy_(x)],), "allreduce_coalesced": ([out.copy_(x), x.clone()],),
                "allgather": ([[out]], [x]), "gather": ([[out]], [x]), "scatter": ([out], [[x]]),
                "reduce_scatter": ([out], [[x]]), "alltoall": ([out], [x]),
            }.get(name, ([out], [x]))  # fmt: skip
            options = kind()
            options.asyncOp = x.is_contiguous()
            work = calls.call(name, [*arguments, options])
            found.append((name, torch.equal(out, want) and (work is None or work.wait()), launched[:]))
            launched.clear()
    return found


FORMS = {
    "reduce": ReduceOptions, "gather": GatherOptions, "scatter": ScatterOptions, "allgather": AllgatherOptions,
    "reduce_scatter": ReduceScatterOptions, "allreduce_coalesced": AllreduceCoalescedOptions,
    "all_gather_single_coalesced": AllgatherOptions, "reduce_scatter_single_coalesced": ReduceScatterOptions,
    "alltoall": AllToAllOptions,
}  # fmt: skip


def by_measurements(rank: int, world_size: int) -> list[str]:
    """What carries a call in a group that goes by measurements, where no kernel runs."""
    launched: list[str] = []
    group: Any = dist.new_group(pg_options=unisono.Options(select="measured"))
    calls = stand_in(group._group, launched)
    calls.kernels = None
    calls.call("allreduce", [[torch.ones(3)], AllreduceOptions()])
    return launched


def test_measurements_of_cpus_choose_nothing_on_gpus() -> None:
    assert ranks(1).run(by_measurements) == [["nccl allreduce"]]


def test_a_group_calls_kernels_for_them() -> None:
    (found,) = ranks(1).run(through_a_group)
    assert [(name, carried) for name, _, carried in found if name == "alltoall"] == [
        ("alltoall", ["nccl alltoall"])
    ] * 2
    for name, right, carried in found:
        collective = name.removesuffix("_coalesced").removesuffix("_single")
        collective = {"allgather": "all_gather", "allreduce": "all_reduce"}.get(collective, collective)
        assert name == "alltoall" or (right and carried == [collective]), name


def by_nccl_again(rank: int, world_size: int) -> tuple[list[str], list[bool]]:
    """What carries calls of a kind that no kernel serves, the later ones known again; whether each has a Work."""
    launched: list[str] = []
    ours: Any = dist.group.WORLD
    calls = stand_in(ours._group, launched)
    calls.kernels.prepare, calls.index = lambda *_: None, -1  # the "GPU" of tensors on the CPU
    options = BroadcastOptions()
    arguments = [[torch.ones(4)], options]
    known = KNOWN_AGAIN["broadcast"](*arguments)
    works = [calls.again("broadcast", arguments, known), calls.call("broadcast", arguments)]
    works += [calls.again("broadcast", arguments, known) for _ in range(2)]
    return launched, [work is not None for work in works]


def lists_again(rank: int, world_size: int) -> list[Any]:
    """By method: which calls on lists are known again, and how often a kernel was launched."""
    launched: list[str] = []
    ours: Any = dist.group.WORLD
    calls, found = stand_in(ours._group, launched), []
    calls.index = -1
    for name in LISTED:
        options, works = FORMS[name](), []
        options.asyncOp = True
        for shape, gaps in (((5, 4), False), ((5, 4), False), ((4, 5), False), ((5, 4), True), ((5, 4), False)):
            x, out = torch.randn(shape), torch.zeros(shape)
            out = torch.zeros(*shape, 2)[..., 0] if gaps else out
            outputs = [[out]] if LISTED[name].endswith("gather") else [out]
            arguments = [outputs, [x] if LISTED[name].endswith("gather") else [[x]], options]
            work = calls.lists.again(name, arguments)
            works.append(work is not None)
            (work or calls.call(name, arguments)).wait()
            assert torch.equal(out, x)
        calls._failed[0] = 1  # of a kernel: nothing is launched any more
        works.append(calls.lists.again(name, arguments) is not None)
        calls._failed[0] = 0
        found.append((name, works, launched.count(LISTED[name])))
    return found


def test_lists_are_known_again() -> None:
    (found,) = ranks(1).run(lists_again)
    assert found == [(name, [False, True, False, False, True, False], 5) for name in LISTED]


def test_each_call_that_nccl_carries_is_made_once() -> None:
    assert ranks(1).run(by_nccl_again) == [(["nccl broadcast"] * 3, [False, True, True, True])]


def test_a_call_for_which_torch_has_no_work_has_one() -> None:
    inner: Any = object.__new__(Inner)
    inner.backend, inner.group, inner._methods = SimpleNamespace(broadcast=lambda *_: None), SimpleNamespace(), {}
    assert inner.call("broadcast", [torch.ones(4)]).wait()

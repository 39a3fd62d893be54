"""What is decided before a launch, which needs no GPU: kernels or NCCL, tiles and blocks, devices, mistakes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, BroadcastOptions, ReduceOp

from unisono.algorithms import build
from unisono.backend.cuda_calls import devices_of, kernel_form, operation_of, strided
from unisono.backend.device_facts import Facts, _kept_table, exchanged, no_kernels
from unisono.backend.device_group import Devices, asked_devices
from unisono.errors import CollectiveTimeout, UsageError
from unisono.gpu.defaults import LAUNCHES, TABLE, GpuDefault, gpu_default, launch_shape, tuned_table
from unisono.gpu.kernel_text import Form, kernel
from unisono.gpu.layout import HALF_NBYTES, ROWS
from unisono.program import lower
from unisono.selection import Measured, Row, table_path


def test_the_table() -> None:
    assert gpu_default("all_reduce", 4, 4) == "one_shot"
    assert gpu_default("all_reduce", 1 << 20, 2) == "one_shot"
    assert gpu_default("all_reduce", 1 << 20, 4) == "two_phase"
    assert gpu_default("all_reduce", (16 << 20) + 1, 4) == ""
    assert gpu_default("broadcast", 8 << 20, 2) == "star"
    assert gpu_default("broadcast", 4 << 20, 4) == ""
    assert gpu_default("reduce", 4 << 20, 2) == gpu_default("gather", 4, 8) == "star"
    assert gpu_default("reduce", 1 << 20, 4) == "two_phase"
    assert gpu_default("scatter", (8 << 20) + 1, 2) == ""


def measured(collective: str, times: dict[int, dict[str, float]], ranks: int = 2, device: str = "cuda") -> list[Row]:
    return [Row(collective, ranks, name, nbytes, seconds, device)
            for nbytes, by in times.items() for name, seconds in by.items()]  # fmt: skip


def test_the_table_by_what_was_measured() -> None:
    rows = measured("all_reduce", {
        64: {"one_shot": 3.0, "two_phase": 5.0, "nccl": 9.0, "default": 2.0},  # which names no schedule
        128: {"one_shot": 5.0, "two_phase": 4.9, "nccl": 9.0},  # no clear difference: as before
        256: {"one_shot": 7.0, "two_phase": 5.0, "nccl": 9.0},
        384: {"one_shot": 9.0, "two_phase": 9.0, "nccl": 8.0},  # at one size alone
        448: {"one_shot": 9.0, "two_phase": 7.0, "nccl": 8.0},
        512: {"one_shot": 9.0, "two_phase": 9.0, "nccl": 8.0},
    })  # fmt: skip
    others = [*measured("broadcast", {64: {"star": 1.0}}), *measured("all_gather", {64: {"direct": 9.0, "nccl": 1.0}}),
              *measured("all_to_all", {64: {"direct": 9.0, "nccl": 1.0}}, ranks=4),
              *measured("reduce_scatter", {64: {"direct": 9.0, "nccl": 1.0}}, device="cpu")]  # fmt: skip
    table = tuned_table([*rows, *others], 2)
    assert [row for row in table if row.collective == "all_reduce"] == [
        GpuDefault("all_reduce", 128, "one_shot"),
        GpuDefault("all_reduce", 448, "two_phase"),
        GpuDefault("all_reduce", 512, ""),
    ]
    chosen = [gpu_default("all_reduce", nbytes, 2, table) for nbytes in (4, 100, 129, 500, 1000)]
    assert chosen == ["one_shot", "one_shot", "two_phase", "", ""]
    assert gpu_default("all_gather", 4, 2, table) == ""
    for name in ("broadcast", "all_to_all", "reduce_scatter"):  # NCCL not measured; other ranks; CPUs
        assert [row for row in table if row.collective == name] == [row for row in TABLE if row.collective == name]


def test_rank_0_brings_the_table_of_its_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert set(_kept_table(2)) == set(TABLE)
    Measured(measured("all_gather", {64: {"star": 1.0, "nccl": 2.0}})).save()
    assert GpuDefault("all_gather", 64, "star") in _kept_table(2)
    assert set(_kept_table(3)) == set(TABLE)
    found = exchanged(Store(), 0, [0], "group x", replace(ONE, table=_kept_table(2)), 1.0)
    assert gpu_default("all_gather", 64, 2, found[0].table) == "star"
    assert gpu_default("all_gather", 65, 2, found[0].table) == "direct"  # as built in, above what was measured
    for ranks in (2, 4, 8):  # what was not measured keeps the limits of the built-in rows, in ranks too
        for nbytes in (1 << 19, 1 << 20, 1 << 23):
            chosen = gpu_default("broadcast", nbytes, ranks, found[0].table)
            assert chosen == gpu_default("broadcast", nbytes, ranks)
    table_path().write_text("no table")
    assert _kept_table(2) == TABLE


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_every_row_has_a_kernel(n: int) -> None:
    for row in TABLE:
        schedule = build(row.schedule, row.collective, n)
        op = "SUM" if schedule.collective.reduces else ""
        for rank in range(n):
            assert kernel(lower(schedule, rank, "put", True), Form(op))


def test_launches_cover_the_data_and_fit() -> None:
    for part in (1, 15, 4096, 100_000, 1 << 24):
        for itemsize in (1, 2, 4, 8):
            for slots in (0, 1, 3, 7, 21):
                shape = launch_shape(part, itemsize, slots, 132)
                assert shape.blocks <= min(132, ROWS)
                assert shape.tile & (shape.tile - 1) == 0
                assert max(1, slots) * shape.tile * itemsize <= HALF_NBYTES
                assert shape.one_tile == (shape.blocks * shape.tile >= part)
    assert [warps for _, _, warps in LAUNCHES] == [4, 8, 16, 16]
    assert launch_shape(1 << 24, 2, 3, 20).blocks == 20


# Facts.

ONE = Facts("a", "GPU", 132, ("a", "b"), ("a", "b"), "", True)


def test_kernels_run_where_all_gpus_are_peers() -> None:
    two = replace(ONE, uuid="b")
    assert no_kernels([ONE, two]) == ""
    assert no_kernels([ONE, two], over_hosts=True) == "the GPUs are on several hosts"
    assert "CUDA_VISIBLE_DEVICES hides them" in no_kernels([ONE, replace(two, visible=("b",))])
    assert "can not map the memory of a peer" in no_kernels([replace(ONE, peers=("a",)), two])
    assert "pip install unisono[gpu]" in no_kernels(
        [ONE, replace(two, unable="Triton is not installed: pip install unisono[gpu]")]
    )
    assert no_kernels([ONE, replace(two, unable="a rank can not compile kernels: no room")]).endswith("no room")
    assert no_kernels([ONE, replace(two, kernels=False)]) == "they are switched off"
    nine = [replace(ONE, uuid=str(k), visible=tuple("012345678"), peers=tuple("012345678")) for k in range(9)]
    assert no_kernels(nine) == "9 GPUs: kernels serve up to 8"


class Store:
    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def get(self, key: str) -> bytes:
        return self.kept[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.kept for key in keys)


def test_facts_are_exchanged() -> None:
    store = Store()
    with pytest.raises(CollectiveTimeout, match=r"rank 5 of group x made no call on GPUs within 0.01 s"):
        exchanged(store, 1, [5, 6], "group x", replace(ONE, uuid="b"), 0.01)
    assert exchanged(store, 0, [5, 6], "group x", ONE, 1.0) == [ONE, replace(ONE, uuid="b")]
    with pytest.raises(UsageError, match=r"ranks 5 and 6 of group x use one GPU \(GPU\): give each its own"):
        exchanged(store, 0, [5, 6], "group x", replace(ONE, uuid="b"), 1.0)


# Which devices a program asked for.


def _new_process_group_helper(backend: str, device_id: Any = None) -> Devices:
    """As torch's function of that name, in whose frame a group is made."""
    import sys

    return asked_devices(sys._getframe())


def test_devices_are_read_from_what_torch_was_asked() -> None:
    assert _new_process_group_helper("unisono") == Devices("unisono", "unisono")
    assert _new_process_group_helper("cpu:unisono,cuda:nccl") == Devices("unisono", "nccl")
    assert _new_process_group_helper("cuda:nccl,cpu:unisono") == Devices("unisono", "nccl")
    assert _new_process_group_helper("cpu:gloo,cuda:unisono") == Devices("gloo", "unisono")
    bound = torch.device("cuda", 1)
    assert _new_process_group_helper("unisono", bound).bound == bound
    assert asked_devices(None) == Devices()
    for text in ("cpu:unisono,cuda:gloo", "cpu:mpi,cuda:unisono", "cpu:unisono,xpu:xccl"):
        with pytest.raises(UsageError, match="can not stand beside unisono"):
            _new_process_group_helper(text)


# Calls as kernels take them; tensors on CPUs stand for those on GPUs.


def options(kind: Any, **fields: Any) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_calls_with_a_kernel() -> None:
    x, whole = torch.ones(6, dtype=torch.bfloat16), torch.empty(12, dtype=torch.bfloat16)
    form = kernel_form("allreduce", ([x], options(AllreduceOptions, reduceOp=ReduceOp.MAX)), 2)
    assert form is not None
    assert (form[0].collective, form[0].dtype, form[0].count, form[0].op) == ("all_reduce", "bfloat16", 6, "MAX")
    form = kernel_form("all_gather_single", (whole, x, AllgatherOptions()), 2, "ring", 3)
    assert form is not None
    assert (form[0].dtype, form[0].count, form[0].schedule, form[0].chunks) == ("int16", 6, "ring", 3)
    assert form[1] is x
    assert form[2] is whole
    form = kernel_form("broadcast", ([torch.ones(3, dtype=torch.complex128)], options(BroadcastOptions, rootRank=1)), 2)
    assert form is not None
    assert (form[0].dtype, form[0].count, form[0].root) == ("int64", 6, 1)


def test_calls_for_nccl() -> None:
    x, opts = torch.ones(6), AllToAllOptions()
    premul = options(AllreduceOptions, reduceOp=ReduceOp.BXOR)
    assert kernel_form("allreduce", ([torch.ones(6, dtype=torch.int32)], premul), 2) is None
    assert kernel_form("allreduce", ([torch.ones(6, dtype=torch.int16)], AllreduceOptions()), 2) is None
    assert kernel_form("all_to_all_single", (torch.empty(6), x, [2, 4], [3, 3], opts), 2) is None
    assert kernel_form("allgather", ([[x]], [x], AllgatherOptions()), 1) is None
    assert kernel_form("allreduce", ([torch.ones(4, 4).t()], AllreduceOptions()), 2) is None
    assert kernel_form("allreduce", ([x.to_sparse()], AllreduceOptions()), 2) is None


def test_an_exchange_in_place_goes_by_a_copy() -> None:
    x = torch.ones(6)
    form = kernel_form("all_to_all_single", (x, x, [], [], AllToAllOptions()), 2)
    assert form is not None
    assert form[1].data_ptr() != form[2].data_ptr()


def test_sizes_and_dtypes_that_do_not_fit() -> None:
    x = torch.ones(6)
    for shape in ((7,), (3, 2)):
        with pytest.raises(UsageError, match=r"all_to_all_single of . elements .* do not fit"):
            kernel_form("all_to_all_single", (torch.empty(shape), torch.ones(shape), [], [], AllToAllOptions()), 2)
    with pytest.raises(
        UsageError, match="reduce_scatter_single of 7 elements of float32 over 2 ranks into 3 of float32"
    ):
        kernel_form("reduce_scatter_single", (torch.empty(3), torch.ones(7), AllreduceOptions()), 2)
    with pytest.raises(UsageError, match="into 12 of float64"):
        kernel_form("all_gather_single", (torch.empty(12).double(), x, AllgatherOptions()), 2)
    freed = torch.ones(6)
    freed.untyped_storage().resize_(0)
    with pytest.raises(UsageError, match="resized to 0"):
        kernel_form("allreduce", ([freed], AllreduceOptions()), 2)


def test_tensors_are_found_wherever_they_stand() -> None:
    a, b = torch.ones(1), torch.ones(1, device="meta")
    assert list(devices_of(([[a, b]], a))) == [torch.device("cpu"), torch.device("meta")]
    assert devices_of(([a], [b]))[b.device] == "argument 1, tensor 0"
    assert devices_of((3, None, SimpleNamespace())) == {}
    assert strided("allreduce", ([a], None)) is None
    gaps = torch.ones(4, 4).t()
    assert strided("broadcast", ([gaps], None)) == (gaps, gaps)
    assert strided("all_gather_single", (gaps, a, None)) is not None
    assert strided("gather", ([], [gaps], None)) is None
    names = ("allreduce_coalesced", "all_gather_single", "reduce_scatter_single", "reduce", "alltoall", "send")
    assert [operation_of(name) for name in names] == [
        "all_reduce", "all_gather", "reduce_scatter", "reduce", "all_to_all", "send"
    ]  # fmt: skip

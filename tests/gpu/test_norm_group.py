"""Norms fused with collectives, and rows with counts on the GPU, by the group class: choices, one rank, two GPUs."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from gpu.test_two_gpus import both, until_raised
from gpu.world import NEEDS_GPU
from ranks import ranks
from unisono import algorithm
from unisono.backend import norm_calls, row_calls
from unisono.backend.norm_calls import NormCalls
from unisono.backend.row_calls import RowCalls
from unisono.errors import MismatchError
from unisono.gpu.norm_kernels import NORM_TABLE, NORMS, NormCall, prepare_norm
from unisono.parallel.expert import all_to_all_rows
from unisono.parallel.tensor import all_reduce_rms_norm, reduce_scatter_rms_norm, rms_norm_all_gather

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")

# Without a GPU: which calls have a kernel, and what a kernel is given.


class Calls:
    """What stands in for the calls of a group on a GPU."""

    def __init__(self, size: int = 2) -> None:
        self.kernels = SimpleNamespace(size=size, rank=0, multiprocessors=132)
        self.launched: list[Any] = []
        self.named = False

    def ready(self, name: str, tensors: Any) -> Any:
        return self.kernels

    def by_name(self) -> bool:
        return self.named

    def served(self, tensor: torch.Tensor) -> bool:
        return True

    def kind(self, call: Any, launch: Any) -> Any:
        return launch, call

    def launch(self, kind: Any, *tensors: int) -> None:
        self.launched.append(kind[1])
        kind[0](5, *tensors)


def test_what_a_norm_kernel_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, given = [], []

    def prepare(kernels: Any, call: NormCall, header: int, aligned: bool) -> Any:
        kinds.append(call)
        return lambda *addresses: given.append(addresses)

    monkeypatch.setattr(norm_calls, "prepare_norm", prepare)
    calls = Calls()
    norms, weight = NormCalls(calls), torch.ones(16)  # type: ignore[arg-type]
    shapes = {
        "all_reduce_rms_norm": ((6, 16), (6, 16), (6, 16)),
        "reduce_scatter_rms_norm": ((6, 16), (3, 16), (3, 16)),
        "reduce_scatter_rms_norm_all_gather": ((6, 16), (3, 16), (6, 16)),
        "rms_norm_all_gather": ((6, 16), None, (12, 16)),
    }
    for collective, (shape, own, result) in shapes.items():
        x, residual = torch.zeros(shape), torch.zeros(own) if own else None
        for _ in range(2):
            kernel = norms.kernel(collective, x, residual, weight, 1e-6)
            assert kernel is not None
            out, carried = kernel(x, residual, weight)
            assert (out.shape, carried.shape) == (result, own or shape)
            first = x if residual is None else residual
            addresses = (5, x.data_ptr(), first.data_ptr(), weight.data_ptr(), out.data_ptr(), carried.data_ptr())
            assert given[-1] == addresses
    assert [call.rows for call in kinds] == [6, 3, 3, 6]
    assert [call.op for call in calls.launched[::2]] == ["all_reduce", "reduce_scatter", "reduce_scatter", "all_gather"]
    assert len({call.signature for call in calls.launched}) == 4
    assert norms.kernel("all_reduce_rms_norm", x, x, weight.double(), 1e-6) is None
    calls.named = True
    assert norms.kernel("all_reduce_rms_norm", x, x, weight, 1e-6) is None


def test_what_a_row_kernel_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, given = [], []

    def prepare(kernels: Any, call: Any, header: int, aligned: bool) -> Any:
        kinds.append(call)
        return lambda *addresses: given.append(addresses)

    monkeypatch.setattr(row_calls, "prepare_rows", prepare)
    calls = Calls()
    rows, counts = RowCalls(calls), torch.zeros(2, dtype=torch.int64)  # type: ignore[arg-type]
    for x, kind in ((torch.zeros(5, 3, 4), ("int32", 12)), (torch.zeros(0, 6, dtype=torch.complex128), ("int64", 12))):
        kernel = rows.kernel(x, counts, 7, 9)
        assert kernel is not None
        out, received = kernel(x, counts)
        assert out.shape == (7, *x.shape[1:])
        assert given[-1] == (5, x.data_ptr(), counts.data_ptr(), out.data_ptr(), received.data_ptr())
        call = kinds[-1]
        assert (call.dtype, call.width, call.agreed, call.rows, call.capacity) == (*kind, 9, len(x), 7)
    assert rows.kernel(torch.zeros(5, 0), counts, 7, 9) is None


def test_what_norm_kernels_serve() -> None:
    kernels: Any = SimpleNamespace(size=4, rank=0, multiprocessors=132)
    assert {row.collective for row in NORM_TABLE} == NORMS.keys()
    for call in (
        NormCall("all_reduce_rms_norm", "bfloat16", 65, 8192, 1e-6),  # larger than its row
        NormCall("all_reduce_rms_norm", "float64", 1, 64, 1e-6),
        NormCall("all_reduce_rms_norm", "bfloat16", 0, 64, 1e-6),
        NormCall("all_reduce_rms_norm", "bfloat16", 1, 1 << 15, 1e-6),  # a row that no block holds
        NormCall("reduce_scatter_rms_norm", "float32", 2, 1 << 14, 1e-6),  # nor a half of staging memory
    ):
        assert prepare_norm(kernels, call, 7, True) is None


# One rank.


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def gpu(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def near(found: torch.Tensor, should: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), should.float(), rtol=2**-7, atol=1e-3)


@NEEDS_GPU
def test_one_rank(group: Any) -> None:
    x, residual, weight = gpu(2, 4, 512), gpu(2, 4, 512), gpu(512)
    norm, carried = all_reduce_rms_norm(x, residual, weight)
    assert torch.equal(carried, residual + x)
    near(norm, F.rms_norm(carried, (512,), weight, 1e-6))
    again, _ = reduce_scatter_rms_norm(x, residual, weight, dim=1)
    near(again, norm)
    near(rms_norm_all_gather(carried, weight), norm)
    calls = group._cuda.kernels
    assert calls is not None
    assert len(group.norms._kinds) == 2  # dim 1 of two is no first dim
    counts = torch.tensor([6], device="cuda")
    out, received = all_to_all_rows(x[0].repeat(2, 1), counts, 7)
    assert received.tolist() == [6]
    assert torch.equal(out, torch.cat([x[0], x[0, :2], torch.zeros_like(x[0, :1])]))
    with algorithm("ring"):
        assert torch.equal(all_reduce_rms_norm(x, residual, weight)[1], carried)


@NEEDS_GPU
def test_compiled_programs(group: Any) -> None:
    x, residual, weight = gpu(4, 512), gpu(4, 512), gpu(512)

    @torch.compile
    def block(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        norm, carried = all_reduce_rms_norm(x * 2, residual, weight)
        return norm * 3 + carried

    norm, carried = all_reduce_rms_norm(x * 2, residual, weight)
    near(block(x, residual), norm.float() * 3 + carried.float())  # rounded once


# Two GPUs.


def everything(rank: int, world_size: int) -> list[str]:
    """Values and gradients against the same group's calls on CPU tensors."""
    torch.cuda.set_device(rank)
    wrong = []

    def check(what: str, found: Any, should: Any, near: float = 2**-6) -> None:
        """The largest difference, as a share of the largest value."""
        for one, want in zip(found, should, strict=True):
            off = (one.detach().cpu().float() - want.detach().float()).abs().max()
            if one.shape != want.shape or not off <= near * want.detach().abs().max():
                wrong.append(f"{what}: {off.item()}")

    chance = torch.Generator().manual_seed(3)
    for rows, hidden in ((1, 4096), (8, 8192), (64, 4096), (6, 1000), (4, 33)):
        residual, weight = (torch.randn(*s, generator=chance).bfloat16() for s in ((rows, hidden), (hidden,)))
        x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(rank)).bfloat16()
        on = [t.cuda().requires_grad_() for t in (x, residual, weight)]
        at = [t.clone().requires_grad_() for t in (x, residual, weight)]
        found, should = all_reduce_rms_norm(*on), all_reduce_rms_norm(*at)
        check(f"norm {rows} {hidden}", found[:1], should[:1])
        check(f"residual {rows} {hidden}", found[1:], should[1:], near=0)
        grads = [torch.autograd.grad((o[0] + o[1]).float().square().sum(), t) for o, t in ((found, on), (should, at))]
        check(f"gradients {rows} {hidden}", *grads)
        if rows % 2:
            continue
        own = slice(rank * rows // 2, (rank + 1) * rows // 2)
        mine = [[t[0], t[1].detach()[own].clone().requires_grad_(), t[2]] for t in (on, at)]
        for whole in (False, True):
            found, should = (reduce_scatter_rms_norm(*t, all_gather=whole) for t in mine)
            check(f"scattered norm {rows} {hidden} {whole}", found[:1], should[:1])
            check(f"scattered residual {rows} {hidden} {whole}", found[1:], should[1:], near=0)
            grads = [torch.autograd.grad((o[0].float().pow(3).sum() + o[1].float().square().sum()), t)
                     for o, t in ((found, mine[0]), (should, mine[1]))]  # fmt: skip
            check(f"scattered gradients {rows} {hidden} {whole}", *grads)
        gathered = [rms_norm_all_gather(t[1], t[2]) for t in mine]
        check(f"gathered {rows} {hidden}", gathered[:1], gathered[1:])
    if len(dist.group.WORLD.norms._kinds) < 12:  # type: ignore[union-attr]
        wrong.append("calls without kernels")
    return wrong


def rows_and_graphs(rank: int, world_size: int) -> list[str]:
    torch.cuda.set_device(rank)
    wrong = []
    x = torch.randn(60, 512, generator=torch.Generator().manual_seed(rank))
    on, counts = x.cuda().requires_grad_(), torch.zeros(2, dtype=torch.int64, device="cuda")
    weight, residual = torch.randn(512).cuda(), torch.ones(60, 512, device="cuda")
    with torch.no_grad():
        all_to_all_rows(on, counts, 100)
        all_reduce_rms_norm(on, residual, weight)
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.graph(graph, stream=side):
        out, received = all_to_all_rows(on, counts, 100)
        back, _ = all_to_all_rows(out, received, 60)
        norm, carried = all_reduce_rms_norm(back, residual, weight)
    for k in range(5):
        mine = torch.tensor([7 * k + rank, 20 - k])
        counts.copy_(mine)
        graph.replay()
        want, count = all_to_all_rows(x, mine, 100)
        returned, _ = all_to_all_rows(want, count, 60)
        should, total = all_reduce_rms_norm(returned, residual.cpu(), weight.cpu())
        for what, found, wanted in (
            ("rows", out, want), ("received", received, count), ("back", back, returned), ("residual", carried, total),
        ):  # fmt: skip
            if not torch.equal(found.cpu(), wanted):
                wrong.append(f"{what} {k}")
        if not torch.allclose(norm.cpu(), should, rtol=1e-4, atol=1e-5):
            wrong.append(f"norm {k}")
    out, _ = all_to_all_rows(on, counts, 30)  # fewer than come
    (gradient,) = torch.autograd.grad(out.square().sum(), on)
    at = x.clone().requires_grad_()
    (should,) = torch.autograd.grad(all_to_all_rows(at, counts.cpu(), 30)[0].square().sum(), at)
    if not torch.equal(gradient.cpu(), should):
        wrong.append("gradient")
    return wrong


@NEEDS_GPU
@TWO
def test_values_and_gradients() -> None:
    assert ranks(2).run(everything, timeout=250) == [[], []]


@NEEDS_GPU
@TWO
def test_rows_and_graphs() -> None:
    assert ranks(2).run(rows_and_graphs, timeout=250) == [[], []]


def other_eps(rank: int) -> str:
    x = torch.ones(4, 64, device="cuda")
    all_reduce_rms_norm(x, x, x[0], 1e-6 if rank else 1e-5)
    torch.cuda.synchronize()
    return until_raised()


def other_capacity(rank: int) -> str:
    all_to_all_rows(torch.ones(4, 64, device="cuda"), torch.tensor([1, 1], device="cuda"), 8 + rank)
    torch.cuda.synchronize()
    return until_raised()


@NEEDS_GPU
@TWO
@pytest.mark.parametrize("fn", [other_eps, other_capacity])
def test_calls_that_differ_raise_on_both(tmp_path: Any, fn: Any) -> None:
    found = both(tmp_path, fn)
    assert set(found) == {0, 1}
    for words, seconds, after in found.values():
        assert MismatchError.__name__ in words
        assert seconds < 10
        assert after == 6

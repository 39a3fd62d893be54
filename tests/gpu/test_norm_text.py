"""Kernels of collectives fused with RMSNorm: golden text, and values by executing it, interleaved at random."""

import os
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpu.device import Device, Number, Pointers, Space, Unstaged
from gpu.test_kernel_text import GOLDEN
from unisono.algorithms import build
from unisono.gpu.kernel_text import module
from unisono.gpu.norm_text import Norm, norm_kernel, norm_kernel_name
from unisono.program import Program, lower

KINDS = {
    "all_reduce": ("one_shot", "all_reduce"), "reduce_scatter": ("direct", "reduce_scatter"),
    "between": ("two_phase", "all_reduce"), "all_gather": ("direct", "all_gather"),
}  # fmt: skip
"""What is fused: `between` is the norm between the reduce_scatter and the all_gather of a two-phase all_reduce."""
EPS = 1e-5


def programs(kind: str, n: int) -> list[Program]:
    schedule = build(*KINDS[kind], n)
    return [lower(schedule, rank, "put", True) for rank in range(n)]


@pytest.mark.parametrize(("kind", "hidden"), [(kind, hidden) for kind in KINDS for hidden in (64, 80)])
def test_three_ranks(kind: str, hidden: int) -> None:
    norm = Norm(hidden, EPS, loop=hidden == 64)
    text = "\n".join(norm_kernel(program, norm) for program in programs(kind, 3))
    file = GOLDEN / "norm" / f"{kind}_{hidden}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def test_no_text_without_its_kernel() -> None:
    assert {f.stem for f in (GOLDEN / "norm").glob("*")} == {
        f"{kind}_{hidden}" for kind in KINDS for hidden in (64, 80)
    }


def wanted(kind: str, xs: Any, residuals: Any, weight: torch.Tensor, rows: int) -> tuple[list[Any], list[Any]]:
    """Norms and residuals by rank, by torch's own operations on the tensors of all ranks."""
    n, hidden = len(xs), weight.numel()
    whole = sum(x.float() for x in xs).to(weight.dtype) if kind != "all_gather" else torch.cat(xs)
    mine = [slice(rank * rows, (rank + 1) * rows) for rank in range(n)]
    if kind != "all_gather":
        sums = [whole if kind == "all_reduce" else whole[own] for own in mine]
        carried = [residual + total for residual, total in zip(residuals, sums, strict=True)]
    else:
        carried = xs
    norms = [F.rms_norm(row, (hidden,), weight, EPS) for row in carried]
    if kind in ("between", "all_gather"):
        norms = [torch.cat(norms)] * n
    return norms, carried


def call(kind: str, n: int, hidden: int, dtype: torch.dtype, chance: random.Random, header: int) -> Any:
    """A call for `Device.launch`, its outputs, what must come out."""
    rows, blocks = chance.randrange(1, 5), chance.randrange(1, 4)
    seed = torch.Generator().manual_seed(chance.randrange(1 << 30))

    def new(*shape: int) -> torch.Tensor:
        return (torch.randint(-64, 64, shape, generator=seed) / 16).to(dtype)

    xs = [new(rows * (1 if kind in ("all_reduce", "all_gather") else n), hidden) for _ in range(n)]
    weight, shared = new(hidden), new(rows, hidden)
    residuals = [shared if kind == "all_reduce" else new(rows, hidden) for _ in range(n)]
    outs = [torch.full((rows * (n if kind in ("between", "all_gather") else 1), hidden), 55.0, dtype=dtype) for _ in xs]
    carried = [torch.full((rows, hidden), 66.0, dtype=dtype) for _ in xs]
    device_count = rows * hidden * (n if kind == "between" else 1)
    norm = Norm(hidden, EPS)

    def arguments(device: Device) -> Any:
        def of(rank: int) -> tuple[Any, ...]:
            five = (xs[rank], residuals[rank], weight, outs[rank], carried[rank])
            flat = [Pointers(Space(tensor.view(-1)), 0) for tensor in five]
            counters = Pointers(device.counters[rank], 0)
            return (
                *flat,
                Pointers("bases", 0),
                counters,
                None,
                Number(device_count),
                header,
                None,
                torch.float32,
                norm.tile,
            )

        return of

    names = [norm_kernel_name(program) for program in programs(kind, n)]
    return (names, blocks, arguments), (outs, carried), wanted(kind, xs, residuals, weight, rows)


def play(n: int, hidden: int, calls: int, seed: int, waits: bool = True) -> int:
    """Random calls of all kinds in a row over one workspace; the number of wrong outputs."""
    chance = random.Random(seed)
    kernels = [norm_kernel(program, Norm(hidden, EPS)) for kind in KINDS for program in programs(kind, n)]
    device = Device(module(kernels), n, chance)
    device.waits = waits
    launched, checks = [], []
    for number in range(calls):
        kind = chance.choice(list(KINDS))
        dtype = chance.choice((torch.bfloat16, torch.float32, torch.float16))
        (names, blocks, arguments), (outs, carried), (norms, sums) = call(kind, n, hidden, dtype, chance, 100 + number)
        launched.append((names, blocks, arguments(device)))
        checks.append((kind, outs, norms, carried, sums))
    device.launch(launched)
    wrong = 0
    for kind, outs, norms, carried, sums in checks:
        for found, norm, residual, total in zip(outs, norms, carried, sums, strict=True):
            wrong += not torch.allclose(found, norm, rtol=0.01 if norm.dtype != torch.float32 else 1e-5)
            wrong += kind != "all_gather" and not torch.equal(residual, total)
    return wrong


@pytest.mark.parametrize("hidden", [64, 80])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_values_in_any_order(n: int, hidden: int) -> None:
    assert play(n, hidden, 30, n) == 0


def test_a_wait_left_out_is_found() -> None:
    found = 0
    for seed in range(6):
        try:
            found += play(3, 64, 6, seed, waits=False)
        except Unstaged:
            found += 1
    assert found

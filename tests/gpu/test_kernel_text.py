"""Generated kernels: their text in golden files, and proved by executing it, ranks and blocks interleaved at random.

After a wanted change, UPDATE_GOLDEN=1 writes the files anew; look at the diff before committing it.
"""

import os
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.device import Device, Number, Pointers, Space, Stuck, Unstaged
from unisono.algorithms import build, list_algorithms
from unisono.algorithms.registry import AlgorithmInfo
from unisono.errors import UsageError
from unisono.gpu.kernel_text import Form, kernel, kernel_name, module, tensors_of
from unisono.gpu.layout import HALF_NBYTES, slot_numel
from unisono.program import Program, Unfit, lower
from unisono.schedule import Schedule

GOLDEN = Path(__file__).parents[1] / "golden" / "kernels"
SERVED = {
    "one_shot": "all_reduce", "two_phase": "all_reduce", "direct_all_gather": "all_gather",
    "direct_reduce_scatter": "reduce_scatter", "direct_all_to_all": "all_to_all", "star": "broadcast",
    "star_reduce": "reduce", "two_phase_reduce": "reduce", "star_gather": "gather", "star_scatter": "scatter",
}  # fmt: skip
TILE = 16


def programs(schedule: Schedule, placement: str = "put") -> list[Program]:
    return [lower(schedule, rank, placement, True) for rank in range(schedule.world_size)]


def named(name: str, n: int) -> Schedule:
    collective = SERVED.get(name, "all_reduce")
    return build(name.removesuffix(f"_{collective}"), collective, n)


def op_of(schedule: Schedule) -> str:
    return "SUM" if schedule.collective.reduces else ""


# Text.

CASES = {
    **{f"{name}_{form}": (name, Form("SUM" if "reduce" in SERVED[name] else "", *options))
       for name in SERVED for form, options in {"loop": (), "one_tile": (False,)}.items()},
    "two_phase_ragged": ("two_phase", Form("SUM", ragged=True)), "two_phase_avg": ("two_phase", Form("AVG")),
    "one_shot_max": ("one_shot", Form("MAX")), "ring_loop": ("ring", Form("SUM")),
    "direct_reduce_scatter_listed": ("direct_reduce_scatter", Form("SUM", listed=True)),
    "star_gather_listed": ("star_gather", Form(listed=True)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_three_ranks(case: str) -> None:
    name, form = CASES[case]
    text = "\n".join(kernel(program, form) for program in programs(named(name, 3)))
    file = GOLDEN / f"{case}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def test_no_text_without_its_kernel() -> None:
    assert {f.stem for f in GOLDEN.glob("*.txt")} == set(CASES)


# Values, in random interleavings.


def tensors(schedule: Schedule, count: int, seed: int, in_place: bool, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Inputs, outputs, and what must come out (None: nothing is to be written), by rank; without unisono's code."""
    c, n = schedule.collective, schedule.world_size
    chance = torch.Generator().manual_seed(seed)

    def new(blocks: int) -> torch.Tensor:
        whole = torch.randint(-99, 99, (blocks * count,), generator=chance)
        return (whole / 8 if dtype.is_floating_point else whole).to(dtype)

    def empty(blocks: int) -> torch.Tensor:
        return torch.full((blocks * count,), 55).to(dtype)

    rooted = [rank == c.root for rank in range(n)]
    blocks_in = {"reduce_scatter": n, "all_to_all": n, "scatter": n}.get(c.name, 1)
    blocks_out = {"all_gather": n, "all_to_all": n, "gather": n}.get(c.name, 1)
    xs = [new(blocks_in) for _ in range(n)]
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = xs[0].to(wide)
    for x in xs[1:]:
        total = total + x.to(wide)
    total = total.to(dtype)
    mine = [slice(rank * count, (rank + 1) * count) for rank in range(n)]
    wanted: list[Any] = {
        "all_reduce": [total] * n,
        "reduce": [total if root else None for root in rooted],
        "broadcast": [xs[c.root]] * n,
        "all_gather": [torch.cat(xs)] * n,
        "gather": [torch.cat(xs) if root else None for root in rooted],
        "reduce_scatter": [total[mine[rank]] for rank in range(n)],
        "scatter": [xs[c.root][mine[rank]] for rank in range(n)],
        "all_to_all": [torch.cat([x[mine[rank]] for x in xs]) for rank in range(n)],
    }[c.name]
    outs = [empty(blocks_out) for _ in range(n)]
    wanted = [w.clone() if w is not None else None for w in wanted]
    if c.name == "broadcast":
        outs = xs
    elif in_place and c.name in ("all_reduce", "reduce"):
        outs = [x if w is not None else out for x, w, out in zip(xs, wanted, outs, strict=True)]
    elif in_place and c.name == "all_gather":
        for rank, out in enumerate(outs):
            out[mine[rank]] = xs[rank]
        xs = [out[mine[rank]] for rank, out in enumerate(outs)]
    elif in_place and c.name == "reduce_scatter":
        outs = [x[mine[rank]] for rank, x in enumerate(xs)]
    return xs, outs, wanted


def walk(device: Device, schedule: Schedule, form: Form, placement: str, chance: random.Random) -> tuple[Any, ...]:
    """A call for `Device.run`, and its outputs with what they must be."""
    dtype = chance.choice((torch.bfloat16, torch.float32, torch.int64))
    count = chance.choice((1, 15, 16, 17, 48, 100)) * (1 if schedule.collective.pieces == 1 else 2)
    part = -(-count // schedule.collective.pieces)
    blocks = chance.randrange(1, 4) if form.loop else 1 + part // TILE
    xs, outs, wanted = tensors(schedule, count, chance.randrange(1 << 30), chance.random() < 0.5, dtype)
    names = [kernel_name(program, form) for program in programs(schedule, placement)]
    acc = torch.float32 if dtype == torch.bfloat16 else dtype
    return (names, xs, outs, count, blocks, TILE, acc), outs, wanted


def play(n: int, schedules: Sequence[tuple[Schedule, Form, str]], calls: int, seed: int, waits: bool = True) -> int:
    """Random calls of these, one after the other over one workspace; the number of wrong outputs."""
    chance = random.Random(seed)
    kernels = [kernel(program, form) for s, form, placement in schedules for program in programs(s, placement)]
    device = Device(module(kernels), n, chance)
    device.waits = waits
    rows, checks = [], []
    for _ in range(calls):
        schedule, form, placement = chance.choice(list(schedules))
        row, outs, wanted = walk(device, schedule, form, placement, chance)
        rows.append(row)
        checks += [(out, want) for out, want in zip(outs, wanted, strict=True) if want is not None]
    device.run(rows)
    return sum(not torch.equal(out, want) for out, want in checks)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_what_is_served_is_right_in_any_order(n: int) -> None:
    forms = [(loop, ragged) for loop in (True, False) for ragged in (True, False)]
    mixed = [
        (named(name, n), Form(op_of(named(name, n)), loop, ragged), "put") for name in SERVED for loop, ragged in forms
    ]
    assert play(n, mixed, 60, n) == 0


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_block_in_a_tensor_of_its_own(n: int) -> None:
    chance = random.Random(n)
    for name in ("direct_all_gather", "direct_reduce_scatter", "star_gather", "star_scatter"):
        schedule = named(name, n)
        for loop, ragged, in_place in ((True, False, True), (False, True, False), (True, True, False)):
            form, lowered = Form(op_of(schedule), loop, ragged, listed=True), programs(schedule)
            count = chance.choice((1, 16, 17, 48, 100))
            xs, outs, wanted = tensors(schedule, count, n, in_place, torch.float32)
            lists = [[[b.clone() for b in t.split(count)] for t in side] for side in (xs, outs)]
            for rank, blocks in enumerate(lists[1] if in_place and name == "direct_all_gather" else ()):
                lists[0][rank] = [blocks[rank]]
            names = [tensors_of(program, form) for program in lowered]
            pairs = list(zip(*lists, strict=True))

            device = Device(module(kernel(program, form) for program in lowered), n, chance)

            def arguments(
                rank: int, names: Any = names, pairs: Any = pairs, count: int = count, device: Device = device
            ) -> Any:
                places = {f"{side}{k or ''}": Pointers(Space(block), 0)
                          for side, blocks in zip(("x", "out"), pairs[rank], strict=True)
                          for k, block in enumerate(blocks)}  # fmt: skip
                given = [places[name] for name in names[rank]]
                own = Pointers("bases", 0), Pointers(device.counters[rank], 0), None, Number(count), 7, None
                return (*given, *own, torch.float32, TILE)

            blocks = 2 if loop else 1 + count // TILE
            device.launch([([kernel_name(program, form) for program in lowered], blocks, arguments)])
            for rank, want in enumerate(wanted):
                assert want is None or torch.equal(torch.cat(lists[1][rank]), want), (name, form)


ALL = [e for e in list_algorithms() if not e.simulation_only and e.collective != "barrier"]


@pytest.mark.parametrize("entry", ALL, ids=lambda e: f"{e.name}-{e.collective}")
def test_every_schedule_runs(entry: AlgorithmInfo) -> None:
    played = 0
    for n in (2, 3, 4):
        for placement in ("put", "staged"):
            try:
                schedule = build(entry.name, entry.collective, n, n - 1 if entry.rooted else 0)
            except UsageError:
                continue
            assert play(n, [(schedule, Form(op_of(schedule)), placement)], 3, n) == 0
            played += 1
    assert played


@pytest.mark.parametrize("name", SERVED)
def test_a_wait_left_out_is_found(name: str) -> None:
    """What the interleavings are worth: without waits something is wrong, or was read before it was ever staged."""
    schedule = named(name, 3)
    found = 0
    for seed in range(6):
        try:
            found += play(3, [(schedule, Form(op_of(schedule)), "put")], 6, seed, waits=False)
        except Unstaged:
            found += 1
    assert found


def test_ranks_that_do_not_come_are_waited_for() -> None:
    schedule = named("one_shot", 2)
    device = Device(module(kernel(p, Form("SUM")) for p in programs(schedule)), 2, random.Random(1))
    names = [kernel_name(p, Form("SUM")) for p in programs(schedule)]
    device.kernels[names[1]] = lambda *_: None
    xs, outs, _ = tensors(schedule, 16, 1, False, torch.float32)
    with pytest.raises(Stuck):
        device.run([(names, xs, outs, 16, 1, TILE, torch.float32)])


# Refusals and sizes.


def test_what_no_kernel_runs_is_refused() -> None:
    with pytest.raises(Unfit, match="staged or put"):
        kernel(lower(build("two_phase", "all_reduce", 2), 0, "mailbox"), Form("SUM"))
    with pytest.raises(Unfit, match="keeps partial sums: kernels take them in rank order"):
        kernel(lower(build("ring", "all_reduce", 3), 0, "put"), Form("SUM"))
    with pytest.raises(Unfit, match="over 9 ranks: kernels serve up to 8"):
        kernel(lower(build("direct", "all_gather", 9), 0, "put"), Form())
    with pytest.raises(UsageError, match="has no kernel for reduce op 'BAND'"):
        kernel(lower(build("one_shot", "all_reduce", 2), 0, "put"), Form("BAND"))


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 35])
def test_slots_fit_their_half(slots: int) -> None:
    for itemsize in (1, 2, 4, 8):
        numel = slot_numel(slots, itemsize)
        assert numel & (numel - 1) == 0
        assert slots * numel * itemsize <= HALF_NBYTES
        assert numel == 1 << 14 or 2 * slots * numel * itemsize > HALF_NBYTES


def test_the_order_of_a_sum_is_that_of_the_ranks() -> None:
    text = kernel(lower(build("one_shot", "all_reduce", 4), 2, "put"), Form("SUM"))
    total = re.search(r"v\d+ = (.*\.to\(ACC\) \+ .*)", text)
    assert total is not None
    loaded = [re.search(rf"{name} = tl.load\((.*?)[,)]", text)[1] for name in re.findall(r"v\d+", total[1])]  # type: ignore[index]
    assert ["x +" in where for where in loaded] == [False, False, True, False]

"""Packing: one call for many tensors, everything else through its strides, checksums in the same pass."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unisono.errors import UsageError
from unisono.weights import layout, plan
from unisono.weights.checksum import checksum
from unisono.weights.packing import Move, Packer, Unpacker
from unisono.weights.regions import Cast
from unisono.weights.rows import Rows, address_of
from unisono.weights.terms import SLOTS, rounds
from weights.moving import bits, numbers, strided


def bound(tensors: dict[str, Tensor], count: int = 1) -> tuple[Packer, Unpacker, Tensor]:
    made = plan(layout(tensors), layout(tensors))
    assert len(made.chunks) == count
    data = torch.empty(made.chunks[0].nbytes, dtype=torch.uint8)
    return Packer(made.moves(0, 0), tensors), Unpacker(made.moves(1, 0), tensors), data


def test_many_small_tensors_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"l{i}": numbers((10, 10), torch.float32, i) for i in range(300)}
    packer, unpacker, data = bound(tensors)
    calls: list[int] = []
    move = Rows.move
    monkeypatch.setattr(Rows, "move", lambda rows, *where: calls.append(len(rows)) or move(rows, *where))
    packer.pack(data)
    assert calls == [300]
    assert bits(data) == b"".join(map(bits, tensors.values()))
    for tensor in tensors.values():
        tensor.zero_()
    unpacker.unpack(data)
    assert calls == [300, 300]
    assert b"".join(map(bits, tensors.values())) == bits(data)


def test_dtypes_of_one_size_go_together() -> None:
    tensors = {"a": numbers((4,), torch.float32), "b": numbers((4,), torch.int32), "c": torch.ones(3, dtype=torch.bool)}
    tensors |= {"d": numbers((4,), torch.float32).to(torch.float8_e4m3fn)}
    packer, _, data = bound(tensors)
    packer.pack(data)
    assert bits(data) == b"".join(bits(tensors[name]) for name in "abcd")


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_strided_conjugated_and_negated_tensors(dtype: torch.dtype) -> None:
    value = numbers((5, 3), dtype) + (1j if dtype.is_complex else 0)
    gaps = strided(value)
    gaps.copy_(value)
    tensors = {"gaps": gaps, "turned": value.t(), "spread": value[:1].expand(4, 3)}
    if dtype.is_complex:
        tensors |= {"conjugated": value.conj(), "negated": value.conj().imag}
    made = plan(layout(tensors), layout(tensors))
    for number, chunk in enumerate(made.chunks):
        data = torch.empty(chunk.nbytes, dtype=torch.uint8)
        Packer(made.moves(0, number), tensors).pack(data)
        wanted = b"".join(bits(tensors[piece.name].resolve_conj().resolve_neg()) for piece in chunk.pieces)
        assert bits(data) == wanted


@pytest.mark.parametrize("loops", ["compiled", "numpy"])
@pytest.mark.parametrize("rows", [9, 40], ids=["short runs", "runs"])
@pytest.mark.parametrize("past", [False, True], ids=["kept", "past caches"])
def test_sums_are_taken_in_the_pass_that_copies(
    loops: str, rows: int, past: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if loops == "numpy":
        monkeypatch.setenv("UNISONO_FUSED", "0")
    whole = numbers((7, 3, 50), torch.float32)
    part, turned = whole[:, :, :rows], numbers((rows, 7), torch.float32, 1).t()
    tensors = {"part": part, "turned": turned}
    moves = [
        Move(0, (7, 3, rows), torch.float32, "part", (0, 0, 0), (0, 1, 2), offsets=(0, 0, 2), whole=(7, 3, 50)),
        Move(84 * rows, (7, rows), torch.float32, "turned", (0, 0), (0, 1), offsets=(0, 0), whole=(7, rows)),
    ]
    wanted = [checksum(part.contiguous(), (0, 0, 2), (7, 3, 50)), checksum(turned.contiguous())]
    data, sums = torch.empty(112 * rows, dtype=torch.uint8), np.zeros(2, dtype=np.uint64)
    packer = Packer(moves, tensors, sums=(0, 8))
    packer.pack(data, address_of(sums), past)
    assert sums.tolist() == wanted
    assert bits(data) == bits(part) + bits(turned)
    packer.sum(torch.empty_like(data), address_of(sums))
    assert sums.tolist() == [2 * value % (1 << 64) for value in wanted]
    taken, sums[:] = {name: strided(tensor) for name, tensor in tensors.items()}, 0
    Unpacker(moves, taken, (0, 8)).unpack(data, address_of(sums), past)
    assert sums.tolist() == wanted
    assert all(taken[name].equal(tensor) for name, tensor in tensors.items())


def test_a_chunk_with_gaps() -> None:
    whole, part = torch.zeros(4, 5, dtype=torch.float64), {"w": numbers((4, 2), torch.float64)}
    place = Move(8, (4, 2), torch.float64, "w", (0, 0), (0, 1), strides=(40, 8))
    for move in (place, place._replace(ops=(Cast(torch.float64),))):
        Packer([move], part).pack(whole.view(-1).view(torch.uint8))
        assert whole[:, 1:3].equal(part["w"])
        assert not whole[:, [0, 3, 4]].any()
        whole.zero_()


def test_nothing_is_received_into_shared_elements() -> None:
    spread = {"w": torch.zeros(1, 3).expand(4, 3)}
    made = plan(layout(spread), layout(spread))
    with pytest.raises(UsageError, match="w is an expanded tensor, whose elements share memory"):
        Unpacker(made.moves(1, 0), spread)


def test_a_move_without_dims() -> None:
    one = {"s": torch.tensor(3.5)}
    data = torch.empty(4, dtype=torch.uint8)
    Packer([Move(0, (), torch.float32, "s", (), ())], one).pack(data)
    assert data.view(torch.float32).item() == 3.5


def test_nothing_to_pack() -> None:
    Packer([], {}).pack(torch.empty(0, dtype=torch.uint8))
    assert Packer([], {}).nbytes == 0


def test_two_rounds_of_windows_fit_into_the_slots() -> None:
    for count in range(70):
        windows: list[Any] = [[], [None] * count]
        for oversubscribed in (False, True):
            found = rounds(windows, oversubscribed)
            assert [step for each in found for step in each] == list(range(count))
            assert all(len(one) + len(other) <= SLOTS for one, other in pairwise(found))
        assert len(rounds(windows, oversubscribed=True)) <= len(rounds(windows))

"""Packing: few calls for many tensors, memory that goes on moves as one, everything else through its strides."""

import pytest
import torch
from torch import Tensor

from unisono.errors import UsageError
from unisono.weights import layout, plan
from unisono.weights.checksum import Checker, checksum
from unisono.weights.packing import Move, Packer, Unpacker
from weights.moving import bits, numbers, strided


def bound(tensors: dict[str, Tensor], count: int = 1) -> tuple[Packer, Unpacker, Tensor]:
    made = plan(layout(tensors), layout(tensors))
    assert len(made.chunks) == count
    data = torch.empty(made.chunks[0].nbytes, dtype=torch.uint8)
    return Packer(made.moves(0, 0), tensors), Unpacker(made.moves(1, 0), tensors), data


def test_many_small_tensors_are_one_cat(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"l{i}": numbers((10, 10), torch.float32, i) for i in range(300)}
    packer, unpacker, data = bound(tensors)
    calls: list[int] = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda views, out: calls.append(len(views)) or cat(views, out=out))
    packer.pack(data)
    assert calls == [300]
    assert bits(data) == b"".join(map(bits, tensors.values()))
    for tensor in tensors.values():
        tensor.zero_()
    unpacker.unpack(data)
    assert b"".join(map(bits, tensors.values())) == bits(data)


def test_memory_that_goes_on_is_one_run() -> None:
    flat = numbers((600,), torch.float32)
    tensors = {f"l{i}": flat[100 * i : 100 * (i + 1)].view(10, 10) for i in range(6)}
    packer, unpacker, data = bound(tensors)
    assert packer.whole is not None
    assert packer.whole.data_ptr() == flat.data_ptr()
    assert bits(packer.whole) == bits(flat)
    assert unpacker.whole is not None
    packer.pack(data)
    assert bits(data) == bits(flat)


def test_neighbours_of_two_allocations_are_not_joined() -> None:
    tensors = {"a": torch.zeros(4), "b": torch.ones(4)}
    assert bound(tensors)[0].whole is None


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


def test_large_tensors_are_summed_step_by_step() -> None:
    tensors = {"big": numbers((3, 1 << 20), torch.float32), "small": numbers((9,), torch.float32, 1)}
    made = plan(layout(tensors), layout(tensors))
    data = torch.empty(made.chunks[0].nbytes, dtype=torch.uint8)
    packer, seen = Packer(made.moves(0, 0), tensors), list[int]()

    class Watched(Checker):
        def until(self, nbytes: int) -> None:
            seen.append(nbytes)
            super().until(nbytes)

    checker = Watched(made.blocks(0, data))
    packer.pack(data, checker)
    assert len(seen) == 13
    assert checker.sums() == {name: checksum(tensor) for name, tensor in tensors.items()}


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
    assert Packer([], {}).whole is None

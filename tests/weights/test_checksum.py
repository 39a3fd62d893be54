"""Checksums: the definition in Python, the compiled loop and NumPy agree; shards add up; damage is found."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.runtime.loops import CHECKSUM, loops
from unisono.weights import rows as module
from unisono.weights.checksum import Block, Checker, checksum, own_blocks, show_checksum
from unisono.weights.rows import Place, Rows, address_of, contiguous, rows_of
from weights.moving import DTYPES, bits, held, layouts_of, numbers, strided, whole_layout, wholes

MODULO = 1 << 64


@pytest.fixture(params=["compiled", "numpy"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "compiled":
        pytest.importorskip("numba", reason="loops are compiled by numba")
        loops.serve(CHECKSUM, at_once=True)
    else:
        monkeypatch.setenv("UNISONO_FUSED", "0")
    return str(request.param)


def mixed(number: int) -> int:
    z = (number + 0x9E3779B97F4A7C15) % MODULO
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % MODULO
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % MODULO
    return (z ^ (z >> 31)) | 1


WEIGHTS = [(mixed((1 << 20) + w) >> 32) | 1 for w in range(1024)]


def defined(tensor: torch.Tensor) -> int:
    """The sum of the module's docstring, word by word."""
    data = bits(tensor)
    data += bytes(-len(data) % 4)
    words = np.frombuffer(data, dtype="<u4").tolist()
    return sum(word * WEIGHTS[i % 1024] * mixed(i // 1024) for i, word in enumerate(words)) % MODULO


def test_the_weights_are_different_and_odd() -> None:
    assert len(set(WEIGHTS)) == 1024
    assert all(weight % 2 for weight in WEIGHTS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 5), (3, 5), (7, 151, 3), (5, 3001), (2, 3, 2, 3, 2, 3, 2)], ids=str)
def test_the_definition(dtype: torch.dtype, shape: tuple[int, ...], either: str) -> None:
    tensor = numbers(shape, dtype)
    assert checksum(tensor) == defined(tensor)
    gaps = strided(tensor)
    gaps.copy_(tensor)
    assert checksum(gaps) == defined(tensor)


def test_it_has_16_digits() -> None:
    assert show_checksum(checksum(torch.zeros(5))) == "0" * 16
    assert show_checksum(-1) == "f" * 16


@pytest.mark.parametrize("sums", ["compiled", "numpy"])
def test_shards_add_up_whatever_their_cut(sums: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if sums == "numpy":
        monkeypatch.setenv("UNISONO_FUSED", "0")

    @settings(max_examples=60)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        whole = data.draw(wholes())
        layout = data.draw(layouts_of(whole))
        total = dict.fromkeys(whole, 0)
        seen = set()
        for rank in range(layout.world_size):
            for block in own_blocks(layout, rank, held(layout, rank, whole, data.draw(st.booleans()))):
                key = block.name, block.offsets, tuple(block.tensor.shape)
                if key not in seen:  # copies count once
                    seen.add(key)
                    total[block.name] += Checker([block]).sums()[block.name]
        assert {name: value % MODULO for name, value in total.items()} == {n: checksum(t) for n, t in whole.items()}

    run()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_any_single_bit_is_found(dtype: torch.dtype) -> None:
    tensor = numbers((3, 700), dtype)
    before, raw = checksum(tensor), tensor.view(-1).view(torch.uint8)
    for place in range(0, raw.numel(), 29):
        for bit in range(8):
            raw[place] ^= 1 << bit
            assert checksum(tensor) != before
            raw[place] ^= 1 << bit
    assert checksum(tensor) == before


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_two_elements_that_change_places_are_found(dtype: torch.dtype) -> None:
    tensor, draw = numbers((9000,), dtype), random.Random(0)
    before = checksum(tensor)
    for _ in range(2000):
        i, j = draw.randrange(9000), draw.randrange(9000)
        if tensor[i] != tensor[j]:
            other = tensor.clone()
            other[i], other[j] = tensor[j].item(), tensor[i].item()
            assert checksum(other) != before


def test_opposite_numbers_that_change_places_are_found() -> None:
    for dtype in (torch.float32, torch.float64):
        tensor = torch.tensor([1.0, -1.0] * 600, dtype=dtype)
        assert checksum(tensor) != checksum(tensor.flip(0))


def test_blocks_of_one_name_add_up() -> None:
    tensor = numbers((2000, 300), torch.float32)
    halves = [Block("w", tensor[:1000], (0, 0), (2000, 300)), Block("w", tensor[1000:], (1000, 0), (2000, 300))]
    assert Checker(halves).sums() == {"w": checksum(tensor)}


@settings(max_examples=100)
@given(st.lists(st.integers(0, 4), max_size=7), st.integers(0, 1))
def test_rows_cover_a_block_once(shape: list[int], more: int) -> None:
    spread = contiguous([length + more for length in shape], 2)
    rows = rows_of(shape, 2, Place(1000, contiguous(shape, 2)), Place(0, spread), Place(7, spread), 16)
    source, target = np.zeros(2 * 4**7, dtype=np.uint8), np.zeros(2 * 5**7 + 2, dtype=np.uint8)
    source[: 2 * math.prod(shape)] = 1
    sums = np.zeros(3, dtype=np.uint64)
    Rows(rows).move(address_of(source) - 1000, address_of(target), address_of(sums))
    assert target.sum() == 2 * math.prod(shape)
    assert sums.any() == (math.prod(shape) > 0)
    assert not sums[:2].any()


@pytest.mark.parametrize("past", [False, True], ids=["kept", "past caches"])
@pytest.mark.parametrize("summing", [False, True], ids=["copied", "summed"])
def test_runs_of_any_length_at_any_place(past: bool, summing: bool, either: str) -> None:
    draw, seen = random.Random(1), np.arange(20000, dtype=np.uint32).astype(np.uint8)
    for _ in range(25):
        run, apart = draw.choice([*range(1, 200), 352, 4096, 9000]), draw.randrange(64)
        source, target, whole = draw.randrange(600), draw.randrange(64), draw.randrange(9000)
        place, count = Place(target, (run, 1)), draw.randrange(1, 3)
        rows = rows_of((count, run), 1, Place(source, (run + apart, 1)), place, Place(whole, (run + apart, 1)))
        made, sums = np.zeros(count * run + 128, dtype=np.uint8), np.zeros(1, dtype=np.uint64)
        Rows(rows).move(address_of(seen), address_of(made), address_of(sums) if summing else 0, past)
        wanted, words = np.zeros_like(made), np.zeros(2 * (9000 + 64) + 9000, dtype=np.uint8)
        for i in range(count):
            taken = seen[source + i * (run + apart) :][:run]
            wanted[target + i * run :][:run] = taken
            words[whole + i * (run + apart) :][:run] = taken
        assert (made == wanted).all()
        if summing:
            assert int(sums[0]) == defined(torch.from_numpy(words))


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """No loop is kept; who asks for one is noted."""
    asked: list[bool] = []
    monkeypatch.setattr(loops, "kept", lambda kind: False)
    monkeypatch.setattr(loops, "serve", lambda kind, at_once: asked.append(at_once))
    monkeypatch.setattr(module, "_taken", 0)
    return asked


def test_the_loop_is_compiled_once_it_pays(unknown: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="loops are compiled by numba")
    checksum(torch.zeros(1000))
    assert unknown == []
    checksum(torch.zeros(3 << 20))
    assert unknown == [False]
    monkeypatch.setenv("UNISONO_FUSED", "now")
    checksum(torch.zeros(10))
    assert unknown == [False, True]


def test_the_whole_of_a_layout_is_that_of_its_tensors() -> None:
    whole = {"a": numbers((5, 6), torch.float32), "b": numbers((3,), torch.int64)}
    sums = Checker(own_blocks(whole_layout(whole), 0, whole)).sums()
    assert sums == {name: checksum(tensor) for name, tensor in whole.items()}

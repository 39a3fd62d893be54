import pytest
import torch

from unisono.bench.settings import DTYPES
from unisono.bench.values import PERIOD, Tables, fill, wrong


@pytest.mark.parametrize("op", ["sum", "avg", "product", "min", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_reduction_is_what_torch_gives_on_the_inputs(op: str, dtype: torch.dtype) -> None:
    tables = Tables(3, dtype, op)
    inputs = torch.stack(tables.inputs).double()
    want = {
        "sum": lambda: inputs.sum(0),
        "avg": lambda: inputs.mean(0),
        "product": lambda: inputs.prod(0),
        "min": lambda: inputs.amin(0),
        "max": lambda: inputs.amax(0),
    }[op]()
    assert torch.equal(tables.reduced, want.to(dtype))
    assert all(len(table.unique()) == (2 if op == "product" else 7) for table in tables.inputs)


def test_whole_numbers_wrap_as_their_dtype_does() -> None:
    tables = Tables(9, torch.uint8, "product")
    want = torch.stack(tables.inputs).long().prod(0) % 256
    assert torch.equal(tables.reduced.long(), want)
    assert Tables(2, torch.int32, "bxor").reduced[:4].tolist() == [
        a ^ b for a, b in zip(*(t[:4].tolist() for t in Tables(2, torch.int32, "bxor").inputs), strict=True)
    ]


@pytest.mark.parametrize("first", [0, 5, PERIOD - 1, 3 * PERIOD + 2])
@pytest.mark.parametrize("count", [0, 1, PERIOD, 2 * PERIOD + 7])
def test_filled_is_right_anywhere(first: int, count: int) -> None:
    table = Tables(1, torch.int16, "sum").inputs[0]
    target = torch.zeros(count, dtype=torch.int16)
    fill(target, table, first)
    assert target.tolist() == table[[(first + i) % PERIOD for i in range(count)]].tolist()
    assert wrong(target, table, first) == 0


def test_every_wrong_element_counts() -> None:
    table = Tables(1, torch.float32, "sum").inputs[0]
    target = torch.zeros(2 * PERIOD)
    fill(target, table)
    target[[0, 17, PERIOD + 3]] += 1
    target[4] *= 1 + 2**-23  # rounding is no mistake
    target[5] = float("nan")
    assert wrong(target, table) == 4
    assert wrong(target, table, 1) > PERIOD  # the right values in the wrong place


@pytest.mark.parametrize("op", ["sum", "premul_sum", "min", "product"])
@pytest.mark.parametrize("name", DTYPES)
def test_a_wrong_element_of_any_dtype_counts(name: str, op: str) -> None:
    dtype = getattr(torch, name)
    table = Tables(2, dtype, op).reduced
    target = torch.zeros(PERIOD, dtype=dtype)
    fill(target, table)
    assert wrong(target, table) == 0
    place = int((table[:PERIOD].to(torch.complex64) != 0).nonzero()[0])
    target[place] = 0
    assert wrong(target, table) == 1

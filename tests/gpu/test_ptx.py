"""What Triton makes of generated kernels, seen without a GPU: 16 bytes an access, and nothing narrower."""

import re

import pytest

from unisono.algorithms import build
from unisono.gpu.compile import HOPPER, Kernel, compiled, triton_missing
from unisono.gpu.kernel_text import Form, kernel, kernel_name, module
from unisono.gpu.norm_kernels import NORMS
from unisono.gpu.norm_text import Norm, norm_kernel, norm_kernel_name
from unisono.gpu.row_text import row_kernel, row_kernel_name, row_module
from unisono.program import lower

pytestmark = pytest.mark.skipif(bool(triton_missing()), reason=triton_missing() or "-")

CASES = [
    ("one_shot", "all_reduce", 4, Form("SUM")), ("one_shot", "all_reduce", 2, Form("MAX", loop=False)),
    ("two_phase", "all_reduce", 4, Form("SUM")), ("two_phase", "all_reduce", 8, Form("AVG")),
    ("two_phase", "all_reduce", 4, Form("SUM", ragged=True)), ("direct", "all_gather", 4, Form()),
    ("direct", "reduce_scatter", 4, Form("SUM")), ("direct", "all_to_all", 4, Form()),
    ("star", "broadcast", 4, Form()),
]  # fmt: skip


def ptx(name: str, collective: str, n: int, form: Form, dtype: str, aligned: bool = True) -> str:
    program = lower(build(name, collective, n), 1, "put", True)
    text = module([kernel(program, form)])
    made = compiled(Kernel(kernel_name(program, form), text, dtype, 4096, 8, not form.ragged, aligned), HOPPER)
    return str(made.asm["ptx"])


def accesses(text: str, what: str) -> list[str]:
    """The loads and stores of data; flags, counters and addresses are single words of 32 or 64 bits."""
    return re.findall(rf"(?:ld|st)\.global[.\w:]*\.{what}\b", text)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}{case[3].suffix}")
def test_accesses_are_wide(case: tuple[str, str, int, Form]) -> None:
    name, collective, n, form = case
    text = ptx(name, collective, n, form, "bfloat16")
    program = lower(build(name, collective, n), 1, "put", True)
    broadcast = collective == "broadcast"
    moved = sum(len(row.to) for row in program.rows)  # at least: values read are on top of it
    assert len(accesses(text, "v4.b32")) >= (1 if broadcast else moved)
    if not form.ragged:
        assert not accesses(text, "(?:b16|b8)")
    assert text.count("st.release.sys.global.u64") == program.meetings * (2 if form.ragged else 1)
    assert "multimem" not in text


@pytest.mark.parametrize("hidden", [4096, 5120])
@pytest.mark.parametrize("collective", NORMS)
def test_accesses_of_fused_norms_are_wide(collective: str, hidden: int) -> None:
    program, norm = lower(build(*NORMS[collective], 4), 1, "put", True), Norm(hidden, 1e-6)
    text = module([norm_kernel(program, norm)])
    made = compiled(Kernel(norm_kernel_name(program), text, "bfloat16", norm.tile, 8), HOPPER)
    found = str(made.asm["ptx"])
    moved = sum(len(row.to) for row in program.rows if row.kind == "copy" and row.to[0].space == "stage")
    assert len(accesses(found, "v4.b32")) >= (moved + 2) * norm.tile // 2048
    assert not accesses(found, "(?:b16|b8)")
    assert found.count("st.release.sys.global.u64") == program.meetings


@pytest.mark.parametrize("n", [2, 4])
def test_accesses_of_rows_with_counts_are_wide(n: int) -> None:
    program = lower(build("direct", "all_to_all", n), 1, "put", True)
    made = compiled(Kernel(row_kernel_name(program), row_module(row_kernel(program)), "int16", 4096, 16), HOPPER)
    found = str(made.asm["ptx"])
    assert len(accesses(found, "v4.b32")) == 2 * n + (n - 1) + (n - 1) + 1  # in, out; sent, received; zeros
    assert not accesses(found, "(?:b16|b8)")
    assert found.count("st.release.sys.global.u64") == 1


def test_what_is_not_aligned_is_narrow_and_no_less_right() -> None:
    assert accesses(ptx("one_shot", "all_reduce", 2, Form("SUM"), "bfloat16", aligned=False), "b16")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64", "int32"])
def test_every_dtype_compiles(dtype: str) -> None:
    for op in ("SUM", "PRODUCT", "MIN", "MAX"):
        assert ".version" in ptx("one_shot", "all_reduce", 2, Form(op), dtype)


@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_data_of_any_width_is_moved(dtype: str) -> None:
    assert accesses(ptx("direct", "all_gather", 2, Form(), dtype), "v4.b32")

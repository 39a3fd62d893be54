"""Compiling generated kernels.

A kernel is compiled for a signature of its own, so that Triton specialises nothing at a launch; without a GPU for a
named target, which shows its PTX.
"""

import hashlib
import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from unisono.errors import UsageError, first_line
from unisono.gpu.layout import WORLD_SIZE_MAX
from unisono.gpu.message_text import SIDE, SIDES, names_of_sides

__all__ = ["DTYPES", "HOPPER", "Kernel", "compiled", "triton_missing"]

DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8",
}  # fmt: skip
"""Triton's name of every dtype that kernels are compiled for."""
HOPPER = ("cuda", 90, 32)
"""A target to compile for where there is no GPU."""
_TYPES = {
    "bases": "*i64", "counters": "*i32", "record": "*i64", "count": "i32", "header": "i32", "limit": "i64",
    "counts": "*i64", "received": "*i64", "rows": "i32", "capacity": "i32", "width": "i32",
    "rank": "i32", "world_size": "i32",
    **{f"{side}_{word}": "i32" for side in names_of_sides(max(SIDES)) for word in SIDE},
}  # fmt: skip
_TENSORS = (
    "x", "out", "residual", "weight", "residual_out",
    *(f"{name}{block}" for name in ("x", "out") for block in range(1, WORLD_SIZE_MAX)),
)  # fmt: skip
"""Arguments of the kernel's dtype."""
_REGISTERS = 64
"""Registers a thread, at most, of blocks of 16 warps: so that two of them fit on a multiprocessor."""


def triton_missing() -> str:
    """Why no kernel can be compiled here; nothing if one can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install unisono[gpu]"
    return ""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel to compile: its name and its module's text, the dtype, BLOCK, warps.

    ``even``: the count, or the width, is a multiple of 16; ``aligned``: all tensors begin at multiples of 16 bytes.
    """

    name: str
    text: str
    dtype: str
    tile: int
    warps: int
    even: bool = True
    aligned: bool = True


@lru_cache(maxsize=256)
def loaded(text: str) -> ModuleType:
    """The module of a text. Triton reads the source of kernels from a file, which is kept by the text's digest."""
    digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    name = f"unisono_kernels_{digest}"
    folder = Path(tempfile.gettempdir()) / f"unisono-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise UsageError(f"{folder} belongs to another user: set TMPDIR to a folder of your own")
    path = folder / f"{name}.py"
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        draft = folder / f"{name}.{os.getpid()}"
        draft.write_text(text, encoding="utf-8")
        draft.rename(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def compiled(kernel: Kernel, target: tuple[str, int, int] | None = None) -> Any:
    """Triton's compiled kernel; ``target``: backend, compute capability and warp size where there is no GPU.

    Raises UsageError if Triton is missing, or can not compile it here.
    """
    if reason := triton_missing():
        raise UsageError(reason)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(loaded(kernel.text), kernel.name)
    types = _TYPES | dict.fromkeys(_TENSORS, f"*{DTYPES[kernel.dtype]}")
    acc = "fp32" if kernel.dtype in ("bfloat16", "float16") else DTYPES[kernel.dtype]
    constants = {"ACC": _element(acc), "BLOCK": kernel.tile}
    names = function.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {"bases", "counters", "record", *_TENSORS * kernel.aligned, *["count", "width"] * kernel.even}
    attributes = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name in aligned}
    source = ASTSource(function, signature, {(names.index(k),): v for k, v in constants.items()}, attributes)
    options = {"num_warps": kernel.warps, "enable_fp_fusion": False}
    if kernel.warps == 16:
        options["maxnreg"] = _REGISTERS
    try:
        return triton.compile(source, target=GPUTarget(*target) if target else None, options=options)
    except Exception as error:  # of any kind: the peers must learn of it
        remedy = "UNISONO_GPU_KERNELS=0 leaves all calls to NCCL"
        words = f"{kernel.name} can not be compiled: {type(error).__name__}: {first_line(error)}"
        raise UsageError(f"{words}; {remedy}") from error


def _element(name: str) -> Any:
    """Triton's dtype of a short name."""
    import triton.language as tl

    long = {"fp32": "float32", "fp64": "float64", "fp16": "float16", "bf16": "bfloat16"}.get(name, name)
    return getattr(tl, long.replace("i", "int") if name.startswith("i") else long)

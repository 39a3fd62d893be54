"""Kernels of collectives fused with RMSNorm: which calls they serve, and their launches."""

from dataclasses import dataclass
from functools import lru_cache

from unisono.algorithms import build
from unisono.gpu.compile import Kernel
from unisono.gpu.defaults import KIB, MIB, GpuDefault, gpu_default
from unisono.gpu.kernel_text import module
from unisono.gpu.kernels import ITEMSIZES, KernelCalls
from unisono.gpu.launching import Launch
from unisono.gpu.layout import HALF_NBYTES, ROWS
from unisono.gpu.norm_text import Norm, norm_kernel, norm_kernel_name
from unisono.program import lower

__all__ = ["NORMS", "NORM_TABLE", "NormCall", "prepare_norm"]

NORMS = {
    "all_reduce_rms_norm": ("one_shot", "all_reduce"),
    "reduce_scatter_rms_norm": ("direct", "reduce_scatter"),
    "reduce_scatter_rms_norm_all_gather": ("two_phase", "all_reduce"),
    "rms_norm_all_gather": ("direct", "all_gather"),
}
"""What is fused, and the schedule and the collective whose program it is."""
NORM_TABLE = (
    GpuDefault("all_reduce_rms_norm", 1 * MIB, "one_shot", 4),
    GpuDefault("all_reduce_rms_norm", 256 * KIB, "one_shot"),
    GpuDefault("reduce_scatter_rms_norm", 16 * MIB, "direct"),
    GpuDefault("reduce_scatter_rms_norm_all_gather", 16 * MIB, "two_phase"),
    GpuDefault("rms_norm_all_gather", 16 * MIB, "direct"),
)
"""As `defaults.TABLE`; bytes of all rows, those of all ranks of an all_gather."""
_DTYPES = ("bfloat16", "float16", "float32")
_TILE_MAX = 1 << 14
_WARPS = ((2 * KIB, 4), (8 * KIB, 8), (1 << 62, 16))
"""Rows: tiles of up to so many bytes by so many warps."""


@dataclass(frozen=True, slots=True)
class NormCall:
    """A kind of call, the same on all ranks: ``rows`` of ``hidden`` elements in a block, of a collective of `NORMS`.

    A block is the whole tensor of an all_reduce, one rank's rows of the others.
    """

    collective: str
    dtype: str
    rows: int
    hidden: int
    eps: float


@lru_cache(maxsize=256)
def _text(collective: str, rank: int, world_size: int, norm: Norm) -> tuple[str, str, int]:
    """A kernel's name, the text of its module, the slots of a half."""
    program = lower(build(*NORMS[collective], world_size), rank, "put", True)
    return norm_kernel_name(program), module([norm_kernel(program, norm)]), max(program.slots, default=0)


def prepare_norm(kernels: KernelCalls, call: NormCall, header: int, aligned: bool) -> Launch | None:
    """The launch of a kind of call, its kernel loaded; None if it is to be made of a collective and a norm.

    Of input, residual, weight, norm, new residual. ``header``: 32 bits that must be equal on all ranks; ``aligned``:
    all tensors begin at multiples of 16 bytes.
    """
    if call.dtype not in _DTYPES or not call.rows * call.hidden:
        return None
    whole = call.rows * (1 if call.collective == "all_reduce_rms_norm" else kernels.size)
    if not gpu_default(call.collective, whole * call.hidden * ITEMSIZES[call.dtype], kernels.size, NORM_TABLE):
        return None
    blocks = min(call.rows, ROWS, kernels.multiprocessors)
    norm = Norm(call.hidden, call.eps, loop=blocks < call.rows)
    name, text, slots = _text(call.collective, kernels.rank, kernels.size, norm)
    nbytes = norm.tile * ITEMSIZES[call.dtype]
    if norm.tile > _TILE_MAX or slots * nbytes > HALF_NBYTES:
        return None
    warps = next(warps for upto, warps in _WARPS if nbytes <= upto)
    even = call.hidden % 16 == 0
    made = Kernel(name, text, call.dtype, norm.tile, warps, even, aligned and even)
    pieces = kernels.size if call.collective == "reduce_scatter_rms_norm_all_gather" else 1
    return kernels.launch(made, blocks, header, call.rows * call.hidden * pieces)

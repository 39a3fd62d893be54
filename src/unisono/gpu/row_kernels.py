"""Kernels of all_to_all of rows whose numbers lie on the device: their launches."""

from dataclasses import dataclass
from functools import lru_cache

from unisono.algorithms import build
from unisono.gpu.compile import Kernel
from unisono.gpu.defaults import launch_shape
from unisono.gpu.kernels import ITEMSIZES, KernelCalls
from unisono.gpu.launching import Launch
from unisono.gpu.row_text import row_kernel, row_kernel_name, row_module
from unisono.program import lower

__all__ = ["RowCall", "prepare_rows"]

_COUNT_MAX = (1 << 31) - 1
_TILE_NBYTES = 8 << 10  # of more than 2 ranks: larger ones spill registers


@dataclass(frozen=True, slots=True)
class RowCall:
    """A kind of call. The same on all ranks: ``width`` elements of a row of ``dtype``, as it is moved, and ``agreed``
    rows, by which the launch is chosen. This rank's: ``rows`` of the input and of the output (``capacity``).
    """

    dtype: str
    width: int
    agreed: int
    rows: int
    capacity: int


@lru_cache(maxsize=64)
def _text(rank: int, world_size: int) -> tuple[str, str]:
    """A kernel's name and the text of its module."""
    program = lower(build("direct", "all_to_all", world_size), rank, "put", True)
    return row_kernel_name(program), row_module(row_kernel(program))


def prepare_rows(kernels: KernelCalls, call: RowCall, header: int, aligned: bool) -> Launch | None:
    """The launch of a kind of call, its kernel loaded; None for rows of more elements than kernels count.

    Of input, counts, output, counts received. ``header``: 32 bits that must be equal on all ranks; ``aligned``: input
    and output begin at multiples of 16 bytes.
    """
    if max(call.width, call.agreed) > _COUNT_MAX:
        return None
    n, itemsize = kernels.size, ITEMSIZES[call.dtype]
    name, text = _text(kernels.rank, n)
    part = -(-call.agreed // n) * call.width
    shape = launch_shape(part, itemsize, n, kernels.multiprocessors)  # the words lie at the end of the last slot
    tile = shape.tile if n <= 2 else min(shape.tile, _TILE_NBYTES // itemsize)
    made = Kernel(name, text, call.dtype, tile, shape.warps, call.width % 16 == 0, aligned)
    return kernels.launch(made, shape.blocks, header, call.rows, call.capacity, call.width)

"""Kernels of one rank in one group: generated, compiled and loaded at the first call of a kind, then launched."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from unisono.algorithms import build
from unisono.errors import UsageError
from unisono.gpu.compile import Kernel, compiled
from unisono.gpu.defaults import TABLE, GpuDefault, gpu_default, launch_shape
from unisono.gpu.kernel_text import Form, kernel, kernel_name, module
from unisono.gpu.launching import Launch, launcher
from unisono.gpu.workspace import Workspace
from unisono.program import lower
from unisono.schedule import Schedule

__all__ = ["ITEMSIZES", "GpuCall", "KernelCalls", "moved_as", "reduces_on_gpu"]

_FLOATS = ("bfloat16", "float16", "float32")
_NUMBERS = (*_FLOATS, "float64", "int32", "int64")
_COUNT_MAX = (1 << 31) - (1 << 20)
_SHAPES = ("all_reduce", "broadcast", "reduce")  # one block


def reduces_on_gpu(op: str, dtype: str) -> bool:
    """True if kernels have a reduce op for a dtype."""
    return dtype in (_FLOATS if op == "AVG" else _NUMBERS) and op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")


def moved_as(itemsize: int, count: int) -> tuple[str, int]:
    """The dtype, and how many elements, as which ``count`` elements of ``itemsize`` bytes are moved."""
    dtype = {2: "int16", 4: "int32"}.get(itemsize, "int64" if itemsize % 8 == 0 else "int8")
    return dtype, count * itemsize // ITEMSIZES[dtype]


@dataclass(frozen=True, slots=True)
class GpuCall:
    """A kind of call: ``count`` elements of a block; ``schedule``: chosen by name, or empty; ``listed``: every block of
    input and output is a tensor of its own. All but that is the same on all ranks.
    """

    collective: str
    dtype: str
    count: int
    op: str = ""
    root: int = 0
    schedule: str = ""
    chunks: int = 1
    listed: bool = False

    def blocks(self, world_size: int) -> int:
        """Blocks of the whole tensor."""
        return 1 if self.collective in _SHAPES else world_size


ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1}
"""Bytes of an element, by dtype."""


@lru_cache(maxsize=256)
def _text(schedule: Schedule, rank: int, form: Form) -> tuple[str, str, int]:
    """A kernel's name, the text of its module, the slots of a half."""
    program = lower(schedule, rank, "put", True)
    return kernel_name(program, form), module([kernel(program, form)]), max(program.slots, default=0)


class KernelCalls:
    """The kernels of a rank. ``multiprocessors``: the least of all ranks' GPUs; ``limit``: seconds that they wait;
    ``table``: which schedule serves which call, equal on all ranks.
    """

    def __init__(
        self, workspace: Workspace, rank: int, world_size: int, multiprocessors: int, limit: float,
        table: tuple[GpuDefault, ...] = TABLE,
    ) -> None:  # fmt: skip
        self.workspace, self.rank, self.size, self.table = workspace, rank, world_size, table
        self.multiprocessors, self.limit = multiprocessors, int(min(limit, 1e9) * 1e9)

    def schedule(self, call: GpuCall) -> Schedule | None:
        """The schedule of a call; None if it goes to NCCL.

        Raises UsageError if one was chosen by name that does not exist for the collective and the number of ranks.
        """
        nbytes = call.count * ITEMSIZES[call.dtype] * call.blocks(self.size)
        name = call.schedule or gpu_default(call.collective, nbytes, self.size, self.table)
        if not name:
            return None
        if not 0 < call.count <= _COUNT_MAX:
            if call.schedule and call.count:
                raise UsageError(f"{call.collective} of {call.count} elements: kernels move up to {_COUNT_MAX}")
            return None
        return build(name, call.collective, self.size, call.root, call.chunks)

    def prepare(self, call: GpuCall, header: int, aligned: bool) -> Launch | None:
        """The launch of a kind of call, its kernel loaded; None if the call goes to NCCL.

        ``header``: 32 bits that must be equal on all ranks; ``aligned``: all tensors begin at multiples of 16 bytes.
        The launch takes the addresses of the input and the output, of a ``listed`` call those of all inputs and all
        outputs, one of each at least. Raises UsageError as `schedule`, and `Unfit` for a schedule that kernels do not
        run.
        """
        schedule = self.schedule(call)
        if schedule is None:
            return None
        pieces = schedule.collective.pieces
        part = call.count if pieces == 1 else (-(-call.count // pieces) + 15) // 16 * 16
        ragged = call.count % 16 != 0
        _, _, slots = _text(schedule, self.rank, Form(call.op, True, ragged, call.listed))
        shape = launch_shape(part, ITEMSIZES[call.dtype], slots, self.multiprocessors)
        name, text, _ = _text(schedule, self.rank, Form(call.op, not shape.one_tile, ragged, call.listed))
        made = Kernel(name, text, call.dtype, shape.tile, shape.warps, not ragged, aligned)
        return self.launch(made, shape.blocks, header, call.count)

    def launch(self, made: Kernel, blocks: int, header: int, *sizes: int) -> Launch:
        """The launch of a kernel, compiled and loaded on the GPU of the workspace; its arguments after the addresses of
        tensors are the workspace, ``sizes``, header and limit.
        """
        space, signed = self.workspace, header - (1 << 32) if header >= 1 << 31 else header
        last = (space.bases, space.counters, space.record, *sizes, signed, self.limit)
        with torch.cuda.device(space.device):
            return launcher(compiled(made), blocks, last)

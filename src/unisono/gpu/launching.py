"""Launching compiled kernels with as little host time as a launch takes: `cuLaunchKernelEx`, its parameters prepared.

Triton's own launcher reads every argument of every launch. Here the parameters lie in memory, a word of 64 bits each,
and a launch writes those that change. Two launches of one function made here must not overlap: its callers hold a lock.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from unisono.errors import UnisonoError, UsageError

__all__ = ["Launch", "launcher", "load", "message_launcher"]

Launch = Callable[..., None]
"""Called with the raw stream and the addresses of the tensors: input and output, or what else a kernel has."""
_OTHER_CONTEXT = (201, 400)  # CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE
_SCRATCH = 2  # pointers that Triton's kernels take after their arguments, of memory that these do not use


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("blocks", ctypes.c_uint * 3), ("threads", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("attributes_count", ctypes.c_uint),
    )  # fmt: skip


@lru_cache(maxsize=1)
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def load(made: Any) -> Any:
    """Loads what Triton has compiled onto the current GPU: while another kernel waits for a peer that would block.

    Raises UsageError if the driver refuses it.
    """
    try:
        made._init_handles()
    except Exception as error:
        raise UsageError(f"{made.metadata.name} can not be loaded: {type(error).__name__}: {error}") from error
    return made


class _Prepared:
    """A launch of a kernel: its configuration and the words of its parameters."""

    def __init__(self, made: Any) -> None:
        load(made)
        count = sum(kind != "constexpr" for kind in made.src.signature.values())
        self.words = (ctypes.c_int64 * (count + _SCRATCH))()
        self.count, self.config = count, _Config()
        self.config.blocks[:], self.config.threads[:] = (1, 1, 1), (32 * made.metadata.num_warps, 1, 1)
        self.config.shared = made.metadata.shared
        first, size = ctypes.addressof(self.words), ctypes.sizeof(ctypes.c_int64)
        places = (ctypes.c_void_p * len(self.words))(*range(first, first + size * len(self.words), size))
        self._arguments = ctypes.byref(self.config), ctypes.c_void_p(made.function), places, None
        self.run: Callable[[], int] = partial(_driver().cuLaunchKernelEx, *self._arguments)
        self._context = ctypes.c_void_p()
        _driver().cuCtxGetCurrent(ctypes.byref(self._context))

    def failed(self, code: int) -> None:
        """Launches again if ``code`` says that another GPU, or none, is the thread's current one; raises for others."""
        if code in _OTHER_CONTEXT:
            before = ctypes.c_void_p()
            _driver().cuCtxGetCurrent(ctypes.byref(before))
            _driver().cuCtxSetCurrent(self._context)
            code = self.run()
            if before:
                _driver().cuCtxSetCurrent(before)
        if code:
            raise UnisonoError(f"CUDA did not launch a kernel: error {code} of cuLaunchKernelEx")


def launcher(made: Any, grid: int, last: Sequence[int]) -> Launch:
    """The launch of a compiled kernel; ``grid``: blocks; ``last``: all arguments after its tensors (of
    `kernel_text.ARGUMENTS` for instance), as integers.
    """
    prepared = _Prepared(made)
    words, config, run, tensors = prepared.words, prepared.config, prepared.run, prepared.count - len(last)
    config.blocks[0] = grid
    words[tensors : prepared.count] = last

    def launch(stream: int, *addresses: int) -> None:
        words[:tensors] = addresses
        config.stream = stream
        if code := run():
            prepared.failed(code)

    return launch


def message_launcher(made: Any) -> Callable[[int, int, Sequence[int]], None]:
    """The launch of a kernel of messages: called with the blocks, the raw stream, and all arguments as integers."""
    prepared = _Prepared(made)
    words, config, run, count = prepared.words, prepared.config, prepared.run, prepared.count

    def launch(grid: int, stream: int, arguments: Sequence[int]) -> None:
        words[:count] = arguments
        config.blocks[0], config.stream = grid, stream
        if code := run():
            prepared.failed(code)

    return launch

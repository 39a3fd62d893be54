"""The interpreters by torch's operations: any dtype, no numba. What peers read and write is what compiled loops do.

It moves bytes by addresses, and makes tensors of the memory there to combine it. A ``sample`` is the `Reducer` of the
call, None where data is only moved.
"""

import ctypes
import time
from functools import lru_cache
from typing import Any

import torch

from unisono.runtime.interpreter import Interpreter, Primitives, interpreter
from unisono.runtime.message_interpreter import message_loops
from unisono.runtime.reduce import Reducer
from unisono.transport import futex
from unisono.transport.inference import outside_inference

__all__ = ["MESSAGE_LOOPS", "TORCH"]

_BYTES = memoryview((ctypes.c_ubyte * (1 << 62)).from_address(0)).cast("B")
"""The addresses of this process, as bytes; and as words, which lie at multiples of their length."""
_WORDS32, _WORDS64 = _BYTES.cast("I"), _BYTES.cast("q")


@lru_cache(maxsize=4096)
@outside_inference
def _tensor(address: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Cached, since calls repeat; it keeps no memory, and is used while its memory is there."""
    return torch.frombuffer(_BYTES[address : address + nbytes], dtype=torch.uint8).view(dtype)


def _numbers(address: int, numel: int, wide: bool, sample: Reducer) -> torch.Tensor:
    """Elements of the user's dtype, or accumulators."""
    dtype = sample.wide if wide and sample.wide is not None else sample.dtype
    return _tensor(address, numel * dtype.itemsize, dtype)


def _words(address: int, count: int) -> Any:
    return _WORDS64[address >> 3 : (address >> 3) + count]


def _load32(address: int) -> int:
    value: int = _WORDS32[address >> 2]
    futex.acquire()
    return value


def _load64(address: int) -> int:
    value: int = _WORDS64[address >> 3]
    futex.acquire()
    return value


def _release32(address: int, value: int) -> None:
    futex.release()
    _WORDS32[address >> 2] = value


def _release64(address: int, value: int) -> None:
    futex.release()
    _WORDS64[address >> 3] = value


def _store(address: int, value: int) -> None:
    _WORDS64[address >> 3] = value


def _pause(address: int, seen: int, limit: int, oversubscribed: int) -> None:
    if not futex.yield_core() and (left := (limit - time.monotonic_ns()) / 1e9) > 0:
        futex.sleep(address, seen, left)


def _sleep(address: int, seen: int, nanoseconds: int) -> None:
    futex.sleep(address, seen, nanoseconds / 1e9)


def _equal(one: int, other: int, nbytes: int) -> bool:
    return _BYTES[one : one + nbytes] == _BYTES[other : other + nbytes]


def _widen(target: int, source: int, nbytes: int, sample: Reducer) -> None:
    numel = nbytes // sample.dtype.itemsize
    _numbers(target, numel, True, sample).copy_(_numbers(source, numel, False, sample))


def _narrow(target: int, source: int, nbytes: int, sample: Reducer) -> None:
    numel = nbytes // sample.dtype.itemsize
    _numbers(target, numel, False, sample).copy_(_numbers(source, numel, True, sample))


def _combine(
    scratch: int, places: Any, parts: int, targets: int, nbytes: int, op: int, size: int, sample: Reducer
) -> None:  # fmt: skip
    numel, count = nbytes // sample.dtype.itemsize, parts + targets
    found = [_numbers(places[j], numel, places[count + j] != 0, sample) for j in range(count)]
    sample(found[:parts], found[parts], size)
    for other in found[parts + 1 :]:
        other.copy_(found[parts])


_PRIMITIVES = Primitives(
    inner=lambda function: function,
    words=_words,
    arrive=futex.arrive,
    load_acquire32=_load32,
    load_acquire64=_load64,
    relax=lambda: None,
    store_release32=_release32,
    store_release64=_release64,
    store=_store,
    now=time.monotonic_ns,
    pause=_pause,
    sleep=_sleep,
    ring=futex.ring,
    equal=_equal,
    copy=ctypes.memmove,
    copy_past=ctypes.memmove,
    widen=_widen,
    narrow=_narrow,
    combine=_combine,
    slowness=10,
)
TORCH: Interpreter = interpreter(_PRIMITIVES)
MESSAGE_LOOPS = message_loops(_PRIMITIVES)

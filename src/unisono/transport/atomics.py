"""Words of shared memory for compiled loops: atomic where ranks meet, in the order the CPU must keep.

`fetch_add` and `load_seq_cst32` are sequentially consistent, `load_acquire32` and `load_acquire64` acquire, the stores
release; LLVM makes of them what the CPU needs, on x86-64 as on weakly ordered ones. Needs numba. The loops are compiled
with these inside, and cached: a change here changes them too.
"""

import platform
from collections.abc import Callable
from typing import Any, TypeVar, cast

from llvmlite import ir
from numba import njit
from numba import types as numba_types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic

__all__ = [
    "copy_256", "copy_256_past", "fetch_add", "inner", "intrinsic", "load_acquire32", "load_acquire64",
    "load_seq_cst32", "on_stack", "pointer", "relax", "settle", "store_release32", "store_release64", "types",
]  # fmt: skip

types: Any = numba_types  # numba's own annotations speak of something else than what its decorators make
intrinsic: Any = numba_intrinsic
_F = TypeVar("_F", bound=Callable[..., Any])
_alloca: Any = cgutils.alloca_once
_function: Any = cgutils.get_or_insert_function
_RELAX: tuple[Any, ...] = {
    "x86_64": ("llvm.x86.sse2.pause",),
    "aarch64": ("llvm.aarch64.hint", 1),  # yield
}.get(platform.machine(), ())
"""LLVM's function of a CPU, and its arguments."""


def inner(function: _F) -> _F:
    """``function`` for use in loops: compiled, without the interpreter's lock, raising nothing."""
    made: Any = njit(nogil=True, error_model="numpy")(function)
    return cast(_F, made)


def _place(builder: Any, address: Any, bits: int) -> Any:
    return builder.inttoptr(address, ir.IntType(bits).as_pointer())


@intrinsic
def pointer(context: Any, address: Any) -> Any:
    """An address as a pointer."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), build


@intrinsic(prefer_literal=True)
def on_stack(context: Any, count: Any) -> Any:
    """The address of ``count`` 64-bit words that are there until the function ends."""
    length = count.literal_value

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(_alloca(builder, ir.IntType(64), length), ir.IntType(64))

    return types.intp(count), build


def _copying(past: bool) -> Any:
    """A function that copies 256 bytes; ``past``: past the caches, to whole lines."""

    @intrinsic
    def copy(context: Any, target: Any, source: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.VectorType(ir.IntType(8), 64)

            def at(start: Any, k: int) -> Any:
                return builder.inttoptr(builder.add(start, ir.Constant(ir.IntType(64), 64 * k)), kind.as_pointer())

            for k, vector in enumerate([builder.load(at(args[1], k), align=1) for k in range(4)]):
                store = builder.store(vector, at(args[0], k), align=64 if past else 1)
                if past:
                    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
            return context.get_dummy_value()

        return types.none(types.intp, types.intp), build

    return copy


copy_256 = _copying(False)
"""Copies 256 bytes between addresses, all read before any is written."""
copy_256_past = _copying(True)
"""The same past the caches, to a multiple of 64; others see it after `settle` at the latest."""


@intrinsic
def settle(context: Any) -> Any:
    """Others see what was stored past the caches before what is stored from here on."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if platform.machine() == "x86_64":
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(_function(builder.module, kind, "llvm.x86.sse.sfence"), [])
        return context.get_dummy_value()

    return types.none(), build


@intrinsic
def relax(context: Any) -> Any:
    """Hints the CPU that this loop polls, so that the other thread of the core runs faster."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _RELAX:
            name, *given = _RELAX
            words = [ir.Constant(ir.IntType(32), number) for number in given]
            kind = ir.FunctionType(ir.VoidType(), [word.type for word in words])
            builder.call(_function(builder.module, kind, name), words)
        return context.get_dummy_value()

    return types.none(), build


@intrinsic
def fetch_add(context: Any, address: Any, value: Any) -> Any:
    """Adds ``value`` to the 32-bit word at an address; returns what it was."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.trunc(args[1], ir.IntType(32))
        return builder.atomic_rmw("add", _place(builder, args[0], 32), value, "seq_cst")

    return types.int32(types.intp, types.int64), build


@intrinsic
def load_seq_cst32(context: Any, address: Any) -> Any:
    """The 32-bit word at an address, not read before what precedes it is written."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_place(builder, args[0], 32), "seq_cst", 4)

    return types.int32(types.intp), build


@intrinsic
def load_acquire32(context: Any, address: Any) -> Any:
    """The 32-bit word at an address."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_place(builder, args[0], 32), "acquire", 4)

    return types.int32(types.intp), build


@intrinsic
def load_acquire64(context: Any, address: Any) -> Any:
    """The 64-bit word at an address."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_place(builder, args[0], 64), "acquire", 8)

    return types.int64(types.intp), build


@intrinsic
def store_release32(context: Any, address: Any, value: Any) -> Any:
    """Stores a 32-bit word at an address, after everything before."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = builder.trunc(args[1], ir.IntType(32))
        builder.store_atomic(word, _place(builder, args[0], 32), "release", 4)
        return context.get_dummy_value()

    return types.none(types.intp, types.int64), build


@intrinsic
def store_release64(context: Any, address: Any, value: Any) -> Any:
    """Stores a 64-bit word at an address, after everything before."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _place(builder, args[0], 64), "release", 8)
        return context.get_dummy_value()

    return types.none(types.intp, types.int64), build

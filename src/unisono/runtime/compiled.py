"""Compiled loops as object code: functions that numba compiles, which Python calls without numba. Needs numba.

Imported only where loops are compiled (loops.py). An entry is what CPython asks of a function in C: it takes its
arguments as an array of Python's integers (METH_FASTCALL), runs the loop, without the interpreter's lock if that may
take long, and returns an integer. All else, numba's own services above all, is dropped, so that the code needs nothing
but the C library and CPython (object_code.py).
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numba import cfunc
from numba.np.numpy_support import carray

from unisono.runtime import words as w
from unisono.runtime.compiled_ops import COMPILED
from unisono.runtime.interpreter import interpreter
from unisono.runtime.message_interpreter import message_loops
from unisono.runtime.object_code import machine, pack, symbol
from unisono.transport.atomics import inner, pointer, types

__all__ = ["compiled", "loops_of"]

_ENTRY = """
declare i64 @PyLong_AsLongLong(ptr)
declare ptr @PyLong_FromLongLong(i64)
declare ptr @PyErr_Occurred()
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
declare i32 @"{loop}"(ptr, ptr{words})

define ptr @{name}(ptr %self, ptr %arguments, i64 %count) {{
  %result = alloca i64
  %error = alloca ptr
  %known = icmp eq i64 %count, {count}
  br i1 %known, label %take, label %fail
take:
{take}
  %failed = call ptr @PyErr_Occurred()
  %taken = icmp eq ptr %failed, null
  br i1 %taken, label %go, label %fail
go:
  {before}
  %status = call i32 @"{loop}"(ptr %result, ptr %error{given})
  {after}
  %found = load i64, ptr %result
  %object = call ptr @PyLong_FromLongLong(i64 %found)
  ret ptr %object
fail:
  ret ptr null
}}
define void @NRT_incref(ptr %object) alwaysinline {{
  ret void
}}
define void @NRT_decref(ptr %object) alwaysinline {{
  ret void
}}
"""
"""An entry to a loop as numba calls it, and no counts of references to numba's memory, of which loops have none."""
_TAKE = """
  %at{k} = getelementptr ptr, ptr %arguments, i64 {k}
  %object{k} = load ptr, ptr %at{k}
  %word{k} = call i64 @PyLong_AsLongLong(ptr %object{k})
"""
_OWN_LOCK = ("run", "issued", "completed")
"""Loops that release Python's lock by themselves, or are as short as that."""
_save_thread = types.ExternalFunction("PyEval_SaveThread", types.voidptr())
_restore_thread = types.ExternalFunction("PyEval_RestoreThread", types.void(types.voidptr))
_SERVICES = {
    "PyErr_Occurred", "PyEval_RestoreThread", "PyEval_SaveThread", "PyLong_AsLongLong", "PyLong_FromLongLong",
    "clock_gettime", "memcpy", "sched_yield", "syscall",
}  # fmt: skip


def loops_of(dtype_name: str | None) -> dict[str, Callable[..., int]]:
    """The loops for a dtype (by numpy's name), or of messages (None), which take addresses and numbers."""
    if dtype_name is None:
        return message_loops(COMPILED)
    dtype, made = getattr(np, dtype_name), interpreter(COMPILED)
    go, note_issued, note_completed = inner(made.run), inner(made.issued), inner(made.completed)
    words = COMPILED.words

    def run(call_at: int, control_at: int, number: int, patience: int, target: int, source: int, resumed: int) -> Any:
        """See `Interpreter`. A short call keeps Python's lock for the microseconds that it polls at first, since to
        release and take it takes a tenth of the call.
        """
        sample = carray(pointer(0), 0, dtype)
        if resumed == 0 and words(call_at, w.CALL_WORDS)[w.SHORT] > 0:
            outcome = go(call_at, control_at, number, -1, target, source, 0, sample)
            if outcome != w.WAITS:
                return outcome
            number, resumed = 0, 1
        thread = _save_thread()
        outcome = go(call_at, control_at, number, patience, target, source, resumed, sample)
        _restore_thread(thread)
        return outcome

    def issued(control_at: int, number: int) -> Any:
        """See `Interpreter`."""
        return note_issued(control_at, number)

    def completed(control_at: int) -> Any:
        """See `Interpreter`."""
        return note_completed(control_at)

    return {"run": run, "issued": issued, "completed": completed}


def _entry(loop: Callable[..., int], name: str, releases: bool) -> Any:
    """The module of the entry called ``name`` to ``loop``, which takes integers; ``releases``: Python's lock."""
    count = len(inspect.signature(loop).parameters)
    made = cfunc(types.intp(*[types.intp] * count), error_model="numpy")(loop)
    module = llvm.parse_assembly(made.inspect_llvm())
    entry = _ENTRY.format(
        name=name,
        loop=made.native_name.removeprefix("cfunc."),
        count=count,
        words=", i64" * count,
        take="".join(_TAKE.format(k=k) for k in range(count)),
        given="".join(f", i64 %word{k}" for k in range(count)),
        before="%thread = call ptr @PyEval_SaveThread()" * releases,
        after="call void @PyEval_RestoreThread(ptr %thread)" * releases,
    )
    module.link_in(llvm.parse_assembly(entry))
    for defined in (*module.functions, *module.global_variables):
        if not defined.is_declaration and defined.name != name:
            defined.linkage = "internal"
    return module


def compiled(kind: str, loops: Mapping[str, Callable[..., int]]) -> bytes:
    """Object code of ``loops``, for which object_code.py makes functions of the same names."""
    module, *others = [_entry(loop, symbol(kind, name), name not in _OWN_LOCK) for name, loop in loops.items()]
    for other in others:
        module.link_in(other)
    builder = llvm.create_pass_builder(machine(), llvm.create_pipeline_tuning_options(3))
    builder.getModulePassManager().run(module, builder)
    needed = {function.name for function in module.functions if function.is_declaration}
    unknown = {name for name in needed - _SERVICES if not name.startswith("llvm.")}
    if unknown:
        raise RuntimeError(f"the loops call {sorted(unknown)}, which are not there where numba is not loaded")
    return pack(list(loops), machine().emit_object(module))

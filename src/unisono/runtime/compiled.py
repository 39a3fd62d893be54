"""The interpreter as compiled loops: whole calls in one call of C, without the interpreter's lock.

Needs numba (`unisono[fast]`), and is imported only where loops are compiled (loops.py).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from unisono.runtime.compiled_ops import COMPILED
from unisono.runtime.interpreter import interpreter
from unisono.transport.atomics import inner, pointer

__all__ = ["loops_of"]


def loops_of(dtype_name: str) -> dict[str, Callable[..., int]]:
    """The loops for a dtype (by numpy's name, see compiled_ops.py), which take addresses and numbers."""
    dtype, made = getattr(np, dtype_name), interpreter(COMPILED)
    go, note_issued, note_completed = inner(made.run), inner(made.issued), inner(made.completed)

    def run(
        call_at: int, control_at: int, number: int, done: int, patience: int, target: int, source: int, resumed: int
    ) -> Any:
        """See `Interpreter`."""
        sample = carray(pointer(0), 0, dtype)
        return go(call_at, control_at, number, done, patience, target, source, resumed, sample)

    def issued(control_at: int, number: int) -> Any:
        """See `Interpreter`."""
        return note_issued(control_at, number)

    def completed(control_at: int, done: int) -> Any:
        """See `Interpreter`."""
        return note_completed(control_at, done)

    return {"run": run, "issued": issued, "completed": completed}

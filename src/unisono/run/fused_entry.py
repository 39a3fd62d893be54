"""How compiled loops are kept on disk: under a name that tells the sources they were made from.

numba looks at the file that a loop is in and at none of those that it takes functions and constants from; a loop of
older ones would go on being used. Needs numba.
"""

import hashlib
from pathlib import Path
from typing import Any

from numba import njit

__all__ = ["entry"]

_RUN = Path(__file__).parent
_SOURCES = [*_RUN.glob("fused*.py"), *(_RUN.parent / "transport").glob("*.py")]
_VERSION = hashlib.blake2b(b"".join(file.read_bytes() for file in sorted(_SOURCES)), digest_size=8).hexdigest()


def entry(function: Any) -> Any:
    """A function compiled to be called from Python: without the interpreter's lock, kept for other processes."""
    function.__qualname__ += f"_{_VERSION}"
    return njit(nogil=True, cache=True)(function)

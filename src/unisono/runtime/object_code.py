"""Object code of compiled loops: kept on disk, and made into functions of Python's. Needs llvmlite, not numba.

Loading takes hundredths of a second, where numba alone takes a third of one to be imported. The code is kept under a
name that tells what it was made from: the sources of the loops, the compiler's version, the CPU.
"""

import ctypes
import functools
import hashlib
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

__all__ = ["functions", "keep", "kept", "machine", "pack", "symbol"]

_FASTCALL = 0x80  # METH_FASTCALL: self, the arguments, how many
_CHECK = 16  # bytes: a digest before the code
_RUN = Path(__file__).parent
_COMPILED = [
    "runtime/compiled*.py",
    "runtime/interpreter.py",
    "runtime/message_interpreter.py",
    "runtime/past_caches.py",
    "runtime/zero_copy.py",
    "transport/atomics.py",
    "transport/native.py",
]
_NUMBERS = [
    "runtime/words.py",
    "runtime/message_words.py",
    "program/bind.py",
    "transport/futex.py",
    "transport/layout.py",
    "transport/ring.py",
]
"""Sources of the loops: the modules compiled, and those whose numbers they hold."""
_OWN = {"checksum": ["runtime/checksum_loop.py"]}
"""Further sources of one kind of loops alone."""


class _Method(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = (("name", ctypes.c_char_p), ("code", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


@functools.cache
def machine() -> Any:
    """This CPU, for the compiler."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        codemodel="jitdefault",
        jit=True,
    )


@functools.cache
def _engine() -> Any:
    return _immortal(llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine()))


def _immortal(thing: Any) -> Any:
    """``thing``, which is not taken down when Python ends: code may run, and functions refer to it, until the last."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


def _sources(kind: str) -> list[Path]:
    names = (*_COMPILED, *_NUMBERS, *_OWN.get(kind, ()))
    return [file for name in names for file in sorted(_RUN.parent.glob(name))]


@functools.cache
def _version(kind: str) -> str:
    parts = [platform.machine(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten(), version("numba")]
    sources = [file.read_bytes() for file in _sources(kind)]
    return hashlib.blake2b(b"".join([*map(str.encode, parts), *sources]), digest_size=8).hexdigest()


def _folders() -> Iterator[Path]:
    """Folders of kept code: beside the sources, as Python's own, or in the user's cache."""
    yield _RUN / "__pycache__"
    yield Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "unisono"


def kept(name: str) -> bytes | None:
    """The code kept as ``name``, whole; None if there is none."""
    for folder in _folders():
        with suppress(OSError):
            found = (folder / f"{name}-{_version(name)}.o").read_bytes()
            if found[:_CHECK] == _digest(found[_CHECK:]):
                return found[_CHECK:]
    return None


def keep(name: str, code: bytes) -> None:
    """Keeps ``code`` for other processes, of other users too (who compiles may be root, for an image), if it can be."""
    for folder in _folders():
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                file.write(_digest(code) + code)
                os.fchmod(file.fileno(), 0o644)
            os.replace(file.name, folder / f"{name}-{_version(name)}.o")
            return


def _digest(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=_CHECK).digest()


def symbol(kind: str, name: str) -> str:
    """The symbol of function ``name`` of a kind: the code of all kinds shares its names."""
    return f"unisono_{kind}_{name}"


def pack(names: Sequence[str], code: bytes) -> bytes:
    """Object code and the names of its functions, as `functions` wants it."""
    return " ".join(names).encode() + b"\n" + code


def functions(kind: str, packed: bytes) -> dict[str, Callable[..., int]]:
    """The functions of the code of a kind, by name; once per kind and process."""
    names, _, code = packed.partition(b"\n")
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.argtypes, make.restype = [ctypes.c_void_p] * 3, ctypes.py_object
    found = {}
    for name in names.decode().split():
        method = _immortal(_Method(name.encode(), engine.get_function_address(symbol(kind, name)), _FASTCALL, None))
        found[name] = make(ctypes.addressof(method), None, None)
    return found

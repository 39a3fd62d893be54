"""Reading a peer's memory through the kernel, in one copy: cross memory attach, ``process_vm_readv``.

The kernel lets a process do so where it could trace the peer: same user, and neither ``kernel.yama.ptrace_scope`` nor a
container's seccomp profile in between. `readable` tries it. The environment variable ``UNISONO_CMA=0`` switches it off.
Never imports torch.
"""

import ctypes
import os
import platform

__all__ = ["NUMBER", "pull", "readable"]

NUMBER = {"x86_64": 310, "aarch64": 270, "riscv64": 270, "loongarch64": 270, "ppc64le": 351, "s390x": 340}.get(
    platform.machine(), 0
)
"""The number of the system call on this machine; 0: unknown."""


class _Range(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_readv = getattr(ctypes.CDLL(None), "process_vm_readv", None)


def pull(pid: int, target: int, source: int, nbytes: int) -> bool:
    """Copies ``nbytes`` from address ``source`` of process ``pid`` to ``target`` here; returns whether all came."""
    assert _readv is not None
    done = 0
    while done < nbytes:
        here, there = _Range(target + done, nbytes - done), _Range(source + done, nbytes - done)
        count = _readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            return False
        done += count
    return True


def readable(pid: int, source: int, expected: bytes) -> bool:
    """Returns whether ``expected`` can be read at address ``source`` of process ``pid``."""
    if _readv is None or not NUMBER or os.environ.get("UNISONO_CMA") == "0":
        return False
    found = ctypes.create_string_buffer(len(expected))
    return pull(pid, ctypes.addressof(found), source, len(expected)) and found.raw == expected

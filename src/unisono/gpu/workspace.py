"""A rank's device workspace and what its kernels need besides: counters, the table of all bases, the failure record."""

import ctypes
from typing import Any

import torch

from unisono.gpu.layout import COUNTERS, RECORD_WORDS, workspace_nbytes

__all__ = ["FAILURES", "Failure", "Workspace", "symmetric_workspace"]

FAILURES = {1: "mismatch", 2: "limit", 3: "ended by its host"}
"""Codes in a failure record."""
_FROM_PEER = 128  # added to the code by a rank that was aborted by another one


class Failure:
    """A failure record as its host reads it: ``kind`` of `FAILURES`, the group rank that was waited for, the flags."""

    def __init__(self, words: list[int]) -> None:
        code = words[0] & 0xFF
        self.from_peer = bool(code & _FROM_PEER)
        self.kind = FAILURES.get(code & ~_FROM_PEER, f"code {code}")
        self.peer = words[0] >> 8 & 0xFF
        self.came, self.expected = words[1] & (1 << 64) - 1, words[2] & (1 << 64) - 1


class Workspace:
    """One rank's workspace. ``bases``: address of a table of all ranks' workspaces; ``keep``: what owns the memory."""

    def __init__(self, bases: int, device: torch.device, keep: Any) -> None:
        self.bases, self.device, self._keep = bases, device, keep
        self._counters = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        self._record = torch.zeros(RECORD_WORDS, dtype=torch.int64).pin_memory()
        self.counters, self.record = self._counters.data_ptr(), self._record.data_ptr()
        self.failed = (ctypes.c_int64 * RECORD_WORDS).from_address(self.record)
        """The failure record: its first word is not 0 once a kernel of this rank has failed."""

    def failure(self) -> Failure | None:
        """The first failure that a kernel of this rank has recorded."""
        return Failure(list(self.failed)) if self.failed[0] else None

    def end_kernels(self) -> None:
        """Ends all kernels of this rank that wait, and by them those of its peers, without a call of CUDA."""
        self.failed[3] = 3


def symmetric_workspace(group_name: Any, device: torch.device, world_size: int) -> Workspace:
    """The workspace of a rank whose peers map it: torch's symmetric memory among the ranks of a C++ group.

    Collective over that group. NVLink multicast is not used.
    """
    import torch.distributed._symmetric_memory as symmetric

    with torch.cuda.device(device):
        memory = symmetric.empty(workspace_nbytes(world_size), dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(memory, group_name)
        memory.zero_()
        torch.cuda.synchronize(device)
        return Workspace(int(handle.buffer_ptrs_dev), device, (memory, handle))

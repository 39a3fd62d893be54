"""The inner group of one of torch's backends that carries what unisono leaves to it: NCCL for CUDA tensors, or Gloo."""

import json
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono.backend.cuda_calls import CANONICAL
from unisono.backend.work import DONE
from unisono.errors import UsageError
from unisono.transport.handshake import make_gloo

__all__ = ["Inner"]

_OTHER_NAMES = {name: earlier for earlier, name in CANONICAL.items()}
_LONGER = 60.0  # s that torch's watchdog, which ends the process, waits longer than this package's


class Inner:
    """A C++ group over one backend. ``store``: with a prefix that no group of the job uses, no earlier one either.

    It never uses NVLink multicast.
    """

    def __init__(
        self, kind: str, store: Any, rank: int, global_ranks: list[int], timeout: timedelta, name: Any,
        device: torch.device,
    ) -> None:  # fmt: skip
        size = len(global_ranks)
        self.name, self._methods = name, dict[str, Callable[..., Any]]()
        if kind == "nccl":
            backend, backend_type = _nccl(store, rank, global_ranks, timeout, name), dist.ProcessGroup.BackendType.NCCL
        else:
            backend, backend_type = _gloo(store, rank, size, timeout), dist.ProcessGroup.BackendType.GLOO
        self.backend = backend
        self.group: Any = dist.ProcessGroup(store, rank, size)
        self.group._set_default_backend(backend_type)
        self.group._register_backend(torch.device(device.type), backend_type, backend)
        self.group._set_group_name(name)
        self.group._set_group_desc("of unisono")
        torch._C._distributed_c10d._register_process_group(name, self.group)
        if kind == "nccl":
            backend.eager_connect_single_device(device)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The Work of torch's own method; a finished one where it gives none, as NCCL does for synchronous calls."""
        return (self._methods.get(name) or self._method(name))(*args, **kwargs) or DONE

    def _method(self, name: str) -> Callable[..., Any]:
        """torch's own method; see `_OTHER_NAMES` for those that releases name differently."""
        for owner in (self.backend, self.group):
            for known in (name, _OTHER_NAMES.get(name, name)):
                if hasattr(owner, known):
                    found: Callable[..., Any] = getattr(owner, known)
                    return self._methods.setdefault(name, found)
        raise UsageError(f"{self.backend.name()} of this torch has no {name}")

    def unfinished(self) -> bool:
        """True if NCCL's flight recorder knows of a call that has not ended."""
        dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
        found = json.loads(dump(includeCollectives=True, onlyActive=False)) if dump is not None else {}
        numbers = {str(row["pg_id"]) for row in found.get("entries", ()) if row["process_group"][0] == self.name}
        known = [found["pg_status"][number] for number in numbers]
        return any(int(one["last_completed_collective"]) < int(one["last_enqueued_collective"]) for one in known)

    def abort(self) -> None:
        """Ends the calls under way."""
        abort = getattr(self.backend, "abort", None)
        if abort is not None:
            abort()

    def close(self, whole: bool = True) -> None:
        """Leaves the group; ``whole``: it was not aborted before."""
        torch._C._distributed_c10d._unregister_process_group(self.name)
        if whole:
            self.backend.shutdown()


def _nccl(store: Any, rank: int, global_ranks: list[int], timeout: timedelta, name: Any) -> Any:
    try:
        from torch._C._distributed_c10d import ProcessGroupNCCL
    except ImportError:
        raise UsageError("this torch was built without NCCL: it has no backend for CUDA tensors") from None
    if os.environ.get("NCCL_NVLS_ENABLE", "0") != "0":
        logging.getLogger("unisono").warning("NCCL_NVLS_ENABLE is set to 0: NVLink multicast is not used")
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    options = ProcessGroupNCCL.Options()
    options._timeout = timeout + timedelta(seconds=_LONGER)
    options.group_name = name
    options.global_ranks_in_group = global_ranks
    backend = ProcessGroupNCCL(store, rank, len(global_ranks), options)
    backend._set_sequence_number_for_group()
    return backend


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    backend = make_gloo(store, rank, size, timeout)
    backend._set_sequence_number_for_group()
    return backend

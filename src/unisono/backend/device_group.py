"""One process group for both devices: CPU tensors by shared memory, CUDA tensors by `device_calls`.

Made in place of `UnisonoProcessGroup` where this process has GPUs. Every method looks where its tensors are; a group
asked for as ``cpu:gloo,cuda:unisono`` leaves CPU tensors to an inner Gloo, one as ``cpu:unisono,cuda:nccl`` all CUDA
tensors to NCCL.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore

from unisono.backend.caller_frame import keep_from_dynamo
from unisono.backend.cuda_calls import CANONICAL, KNOWN_AGAIN, devices_of
from unisono.backend.device_calls import DeviceCalls
from unisono.backend.device_messages import MESSAGES
from unisono.backend.group import Group
from unisono.backend.inner import Inner
from unisono.backend.list_calls import LISTED
from unisono.backend.norm_calls import NormCalls
from unisono.backend.overloads import with_options
from unisono.backend.process_group import UnisonoProcessGroup
from unisono.backend.row_calls import RowCalls
from unisono.errors import UsageError

__all__ = ["METHODS", "Devices", "TwoDeviceGroup", "asked_devices"]

METHODS = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "broadcast", "allgather", "all_gather_single", "all_gather_single_coalesced",
    "allgather_coalesced", "gather", "scatter", "alltoall", "all_to_all_single", "send", "recv", "recv_anysource",
    *CANONICAL,
)  # fmt: skip
_SERVED = {"cpu": ("unisono", "gloo"), "cuda": ("unisono", "nccl")}


@dataclass(frozen=True, slots=True)
class Devices:
    """Which backend has which device, and the GPU that was given as ``device_id``."""

    cpu: str = "unisono"
    cuda: str = "unisono"
    bound: torch.device | None = None


def asked_devices(frame: FrameType | None) -> Devices:
    """What the program asked of torch, read in the frame of the function of torch that makes groups.

    torch hands a backend neither the string ``cpu:unisono,cuda:nccl`` nor ``device_id``. Raises `UsageError` for
    combinations that are not served.
    """
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    if frame is None:
        return Devices()
    text, bound = str(frame.f_locals.get("backend") or ""), frame.f_locals.get("device_id")
    bound = bound if isinstance(bound, torch.device) and bound.type == "cuda" else None
    if ":" not in text:
        return Devices(bound=bound)
    return _devices(text, bound)


def _devices(text: str, bound: torch.device | None) -> Devices:
    """The devices of ``cpu:unisono,cuda:nccl``, in any order."""
    found = dict(part.strip().split(":", 1) for part in text.split(","))
    for device, backend in found.items():
        if backend.lower() not in _SERVED.get(device, ()):
            served = "; ".join(f"{name}: {' or '.join(names)}" for name, names in _SERVED.items())
            raise UsageError(f"backend {text!r}: {device}:{backend} can not stand beside unisono ({served})")
    return Devices(found.get("cpu", "unisono").lower(), found.get("cuda", "unisono").lower(), bound)


class TwoDeviceGroup(UnisonoProcessGroup):
    """A process group for CPU and CUDA tensors."""

    def __init__(self, group: Group, store: Any, timeout: timedelta, devices: Devices, kernels: bool = True) -> None:
        super().__init__(group, store, timeout)
        wanted = kernels and devices.cuda == "unisono"
        self._cuda = DeviceCalls(group, store, timeout, wanted, devices.bound)
        self.norms, self.rows = NormCalls(self._cuda), RowCalls(self._cuda)
        self._on_cpu = devices.cpu
        self._gloo: Inner | None = None

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: torch.device) -> Any:
        """torch asks it for timeouts and aborts: of CUDA, NCCL's."""
        if torch.device(device).type != "cuda":
            return self
        index = torch.device(device).index
        self._group.join("a call on GPUs")
        return self._cuda.start(torch.device("cuda", torch.cuda.current_device() if index is None else index)).backend

    def _cpu_inner(self) -> Inner:
        """The inner Gloo, of ``cpu:gloo,cuda:unisono``."""
        if self._gloo is None:
            group = self._group
            self._group.join("a call on CPUs")
            store = PrefixStore(f"gloo/{group.nonce}/", self._store)
            name = f"unisono/{group.nonce}/cpu"
            self._gloo = Inner(
                "gloo", store, group.rank, group.global_ranks, self._timeout, name, torch.device("cpu")
            )  # fmt: skip
        return self._gloo

    def shutdown(self) -> None:
        """Leaves both groups."""
        self._cuda.close()
        if self._gloo is not None:
            self._gloo.close()
        super().shutdown()

    def abort(self) -> None:
        """Leaves at once; calls under way end with an error."""
        if self._cuda.inner is not None:
            self._cuda.inner.abort()
        super().abort()


def _routed(name: str, cpu: Callable[..., Any]) -> Callable[..., Any]:
    """The method ``name`` of both devices."""
    canonical, signature = CANONICAL.get(name, name), inspect.signature(cpu)
    known, listed = KNOWN_AGAIN.get(canonical), canonical in LISTED

    def method(self: TwoDeviceGroup, *args: Any, **kwargs: Any) -> Any:
        calls = self._cuda
        if kwargs or calls.index < 0:
            pass
        elif known is not None:
            if (form := known(*args)) is not None and (work := calls.again(canonical, args, form)) is not None:
                return work
        elif listed and (work := calls.lists.again(canonical, args)) is not None:
            return work
        devices = devices_of((*args, *kwargs.values()))
        if not any(device.type == "cuda" for device in devices):
            if self._on_cpu == "gloo" and devices:
                return self._cpu_inner().call(canonical, *args, **kwargs)
            return cpu(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        arguments = list(bound.arguments.values())[1:]
        if canonical in MESSAGES or hasattr(arguments[-1], "asyncOp"):
            return self._cuda.call(canonical, arguments)
        bound.apply_defaults()
        del bound.arguments["self"]
        try:
            arguments = with_options(canonical, bound.arguments)
        except UsageError as error:
            return self._cuda.refuse(canonical, error, next(device for device in devices if device.type == "cuda"))
        return self._cuda.call(canonical, arguments)

    method.__name__ = name
    return method


for _name in METHODS:
    setattr(TwoDeviceGroup, _name, _routed(_name, getattr(UnisonoProcessGroup, _name)))

keep_from_dynamo(TwoDeviceGroup)

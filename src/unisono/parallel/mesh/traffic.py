"""Calls, bytes and seconds along each axis of a mesh; torch's CommDebugMode counts the calls alone, of all axes.

It counts no point to point either, and sees nothing on a backend that is written in Python. This works on every
backend, for it stands between the program and torch.distributed: while the context is open, the public functions that
parallel training calls (`_CALLS`; no others) are replaced by ones that note for which group they are called. Meant for
a measured step.
"""

import inspect
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["CommunicationMeter", "Traffic"]

_CALLS = {  # function: the argument that is this rank's payload
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_single": "input_tensor",
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "irecv": "tensor",
    "isend": "tensor",
    "reduce_scatter_single": "input",
    "reduce_scatter_tensor": "input",
}


@dataclass
class Traffic:
    """Of one group: calls, bytes of this rank's tensors in them, seconds inside calls and waits (idle ones as well)."""

    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def timed(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function, and note how long it takes."""
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - begin


class CommunicationMeter:
    """Notes the communication along the axes of a mesh with more than one rank; that of other groups passes unnoted.

        with CommunicationMeter(mesh) as meter:
            model.step(windows)
        meter.traffic["tp"].seconds

    Of a call with `async_op` the issuing and the `wait` count, not the time between, which overlaps with other work.
    The waits that a pipeline's bubble makes are waits for messages along pp.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        groups = {axis: mesh.get_group(axis) for axis in mesh.mesh_dim_names or ()}
        self._names = {group.group_name: axis for axis, group in groups.items() if dist.get_world_size(group) > 1}
        self.traffic = {axis: Traffic() for axis in self._names.values()}
        self._originals = ExitStack()
        there = {name: payload for name, payload in _CALLS.items() if hasattr(dist, name)}
        self._noting: dict[str, Callable[..., Any]] = {
            **{name: self._noted(getattr(dist, name), payload) for name, payload in there.items()},
            "batch_isend_irecv": self._batch(dist.batch_isend_irecv),
            "P2POp": _point_to_point(dist.P2POp),
        }

    def __enter__(self) -> Self:
        for name, function in self._noting.items():
            self._originals.callback(setattr, dist, name, getattr(dist, name))
            setattr(dist, name, function)
        return self

    def __exit__(self, *details: object) -> None:
        self._originals.close()

    @property
    def seconds(self) -> float:
        """Along all axes, since the meter was made; it may be opened again and again."""
        return sum(traffic.seconds for traffic in self.traffic.values())

    def _of(self, group: dist.ProcessGroup | None) -> Traffic | None:
        name = self._names.get((group or dist.distributed_c10d._get_default_group()).group_name)
        return None if name is None else self.traffic[name]

    def _noted(self, function: Callable[..., Any], payload: str) -> Callable[..., Any]:
        """The function, timed."""
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            traffic = self._of(given.get("group"))
            if traffic is None:
                return function(*args, **kwargs)
            traffic.calls += 1
            traffic.nbytes += given[payload].nbytes
            work = traffic.timed(function, *args, **kwargs)
            return None if work is None else _TimedWork(work, traffic)

        return call

    def _batch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Several sends and receives of one group at once."""

        def call(operations: list[Any]) -> list[Any]:
            traffic = self._of(operations[0].group)
            if traffic is None:
                return function(operations)  # type: ignore[no-any-return]
            traffic.calls += len(operations)
            traffic.nbytes += sum(operation.tensor.nbytes for operation in operations)
            return [_TimedWork(work, traffic) for work in traffic.timed(function, operations)]

        return call


class _TimedWork:
    """A Work whose wait is timed."""

    def __init__(self, work: Any, traffic: Traffic) -> None:
        self._work, self._traffic = work, traffic

    def wait(self, *args: Any) -> Any:
        return self._traffic.timed(self._work.wait, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _point_to_point(kind: Callable[..., Any]) -> Callable[..., Any]:
    """P2POp takes torch's own isend and irecv, no others."""

    def make(op: Any, *args: Any, **kwargs: Any) -> Any:
        return kind(getattr(op, "__wrapped__", op), *args, **kwargs)

    return make

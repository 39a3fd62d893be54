"""The Works of calls on GPUs: `wait` orders the current stream after the call, and nothing waits on the host."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from unisono.errors import UnisonoError

__all__ = [
    "Done",
    "LastStream",
    "LaunchedWork",
    "MessageWork",
    "current_stream",
    "external_stream",
    "new_event",
    "new_stream",
    "raw_stream",
]

raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0)  # without CUDA
"""The handle of the current stream of a GPU, by the GPU's index."""
_known: dict[tuple[int, int], torch.cuda.Stream] = {}  # by device and handle: to ask torch for one takes longer
_NON_BLOCKING = 1


def external_stream(handle: int, device: torch.device | None) -> torch.cuda.Stream:
    """The stream of a handle."""
    return torch.cuda.ExternalStream(handle, device)  # type: ignore[no-untyped-call]


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """The current stream of a GPU."""
    key = device.index, raw_stream(device.index)
    stream = _known.get(key)
    if stream is None:
        stream = _known[key] = torch.cuda.current_stream(device)
    return stream


class LastStream:
    """The stream that kernels of a group were launched on last: they must not overlap, for they share a workspace."""

    def __init__(self) -> None:
        self.stream, self.captured = -1, False  # its handle, and whether it was captured then

    def follow(self, stream: int, device: torch.device | None) -> None:
        """Orders the current stream of the device, ``stream``, after it."""
        last, captured, capturing = self.stream, self.captured, torch.cuda.is_current_stream_capturing()
        self.stream, self.captured = stream, capturing
        if last >= 0 and captured == capturing:  # a graph is ordered by the stream that it is replayed on
            torch.cuda.current_stream(device).wait_stream(external_stream(last, device))


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nothing else uses: torch's own are handed out in turn, and two of them may be one."""
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        code = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING)
    if code:
        raise UnisonoError(f"CUDA gave no stream on {device}: error {code} of cuStreamCreate")
    return external_stream(handle.value or 0, device)


def new_event() -> torch.cuda.Event:
    """An event without a time."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


_begin = Work.__init__  # found once: it is called for every asynchronous call


class _DeviceWork(Work):
    """``check`` raises the error of the group if a call on GPUs has failed."""

    __slots__ = ("_check", "_outputs")
    _outputs: list[torch.Tensor]
    _check: Callable[[], None]

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_success(self) -> bool:
        """True once it is complete, unless the group has failed."""
        try:
            self._check()
        except UnisonoError:
            return False
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """Complete at once, in the order of streams: who reads it goes on after the call.

        DDP's reducer, which asks from a thread without frames of Python, reads it on the stream that is ordered here:
        it is given a tensor as C++ has it, since what Python sets is pickled in search of tensors, here and there.
        """
        self.wait()
        future: Any
        if len(self._outputs) == 1 and sys._getframe().f_back is None:
            future = torch._C.fork(self._outputs.__getitem__, 0)
        else:
            future = torch.futures.Future(devices=[self._outputs[0].device])
            future.set_result(self._outputs)
        return future  # type: ignore[no-any-return]


class LaunchedWork(_DeviceWork):
    """A kernel launched on ``stream``, a handle."""

    __slots__ = ("_stream",)

    def __init__(self, outputs: list[torch.Tensor], stream: int, check: Callable[[], None]) -> None:
        _begin(self)
        self._outputs, self._check, self._stream = outputs, check, stream

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises the error of the group if a kernel has failed."""
        self._check()
        if raw_stream(self._outputs[0].get_device()) != self._stream:
            device = self._outputs[0].device
            torch.cuda.current_stream(device).wait_stream(external_stream(self._stream, device))
        return True

    def is_completed(self) -> bool:
        """True once the stream has reached the end of the kernel."""
        return external_stream(self._stream, self._outputs[0].device).query()


class Done:
    """What a stream has to do so far is done. ``free``: unused events of its GPU, where its own one goes at its end."""

    def __init__(self, stream: torch.cuda.Stream, free: list[torch.cuda.Event]) -> None:
        self._event, self._awaited, self._free = free.pop() if free else new_event(), -1, free
        self._event.record(stream)

    def __del__(self) -> None:
        self._free.append(self._event)

    def order(self, device: torch.device) -> torch.cuda.Stream:
        """Orders the current stream of the GPU after it; returns that."""
        handle, stream = raw_stream(device.index), current_stream(device)
        if handle != self._awaited:
            stream.wait_event(self._event)
            self._awaited = handle
        return stream

    def query(self) -> bool:
        """True once it is."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class MessageWork(_DeviceWork):
    """Messages of one launch, on a stream of its own, which have been moved once all is ``done``; ``source``: the peer
    of a receive that is alone, else -1.

    ``copies``: tensors of receives, with what was filled in place of each; brought there by the first `wait`: earlier,
    the kernel that copies would be loaded while the message is awaited, which blocks.
    """

    __slots__ = ("_copies", "_done", "_source")

    def __init__(
        self, tensors: list[torch.Tensor], done: Done, source: int, check: Callable[[], None],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:  # fmt: skip
        _begin(self)
        self._outputs, self._check, self._done, self._source, self._copies = tensors, check, done, source, copies

    def source_rank(self) -> int:
        """The group rank that a receive is from."""
        return self._source

    _source_rank = source_rank

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises the error of the group if a kernel has failed."""
        self._check()
        stream = self._done.order(self._outputs[0].device)
        copies, self._copies = self._copies, ()
        for tensor, flat in copies:
            flat.record_stream(stream)
            tensor.copy_(flat)
        return True

    def is_completed(self) -> bool:
        """True once they have been moved."""
        return self._done.query()

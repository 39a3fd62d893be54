"""Messages of CUDA tensors of one rank in one group: by kernels up to a size, by the inner NCCL above it.

Each peer and direction has a stream of its own, as have the sets of them that go in one launch, and rows of its own in
the workspace: a send never waits for a receive of this rank, nor a message of one peer for those of another. A message
is ordered after the current stream at the call; `wait` of its Work orders the current stream after it. All kernels are
loaded when the group makes its first call on GPUs, so that none is loaded while another one waits for a peer.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.backend.device_work import Done, MessageWork, current_stream, new_event, new_stream
from unisono.backend.group import Group
from unisono.backend.inner import Inner
from unisono.backend.tensors import PLAIN, check_memory
from unisono.errors import UsageError
from unisono.gpu.defaults import MESSAGE_NBYTES
from unisono.gpu.messages import MessageKernels, Side, header_of

__all__ = ["MESSAGES", "DeviceMessages"]

MESSAGES = ("send", "recv", "recv_anysource")
"""torch's methods that are served here."""
_ALIGNED = 16
_free: dict[int, list[torch.cuda.Stream]] = {}  # by device: streams of groups that were left


@dataclass(slots=True)
class _Message:
    """A send or a receive, checked: ``flat`` is what a kernel moves, None if NCCL does."""

    op: str
    tensor: torch.Tensor
    peer: int
    tag: int
    flat: torch.Tensor | None = None

    @property
    def side(self) -> Side:
        """As kernels take it."""
        assert self.flat is not None
        header = header_of(self.tensor.dtype, self.tensor.numel(), self.tag)
        return Side(self.flat.data_ptr(), self.flat.nbytes, header, self.peer)


def _held_weakly(method: Callable[[], None]) -> Callable[[], None]:
    """The method, as long as its object lives: what has messages is not kept by them."""
    held = weakref.WeakMethod(method)

    def call() -> None:
        found = held()
        if found is not None:
            found()

    return call


class DeviceMessages:
    """``check`` raises the error of the group if it has failed; ``kernels``: None where NCCL carries all."""

    def __init__(
        self, group: Group, inner: Inner, device: torch.device, kernels: MessageKernels | None,
        check: Callable[[], None],
    ) -> None:  # fmt: skip
        self._inner, self._device, self._kernels = inner, device, kernels
        self._check = _held_weakly(check)
        self._operations, self._guard = group.operations, group.device_guard.messages
        self._streams: dict[tuple[tuple[str, int], ...], torch.cuda.Stream] = {}  # by the ways of a launch
        self._last: dict[tuple[str, int], torch.cuda.Stream] = {}  # of each way
        self._before, self._events = new_event(), list[torch.cuda.Event]()
        self._lock = threading.Lock()

    def call(self, name: str, arguments: Sequence[Any]) -> Any:
        """The Work of a message by one of torch's methods. Raises `UsageError`, and what the guard finds."""
        message = self._checked(name, *arguments)
        with self._lock:
            self._issued(message)
            if not message.tensor.numel():
                return self._empty(message)
            if message.flat is not None:
                return self._launched([message])
        return self._inner.call(name, [message.tensor], message.peer, message.tag)

    def batch(self, calls: Sequence[tuple[str, torch.Tensor, int, int]]) -> list[Any]:
        """The Works of messages (send or recv, tensor, group rank, tag) that are issued together, one for those of a
        launch: none waits for another one, and those that NCCL carries are one call of its.
        """
        messages = [self._checked(op, [tensor], peer, tag) for op, tensor, peer, tag in calls]
        with self._lock:
            for message in messages:
                self._issued(message)
            works: list[Any] = [self._empty(message) for message in messages if not message.tensor.numel()]
            moved = [message for message in messages if message.tensor.numel()]
            works += self._by_kernels([message for message in moved if message.flat is not None])
        if large := [message for message in moved if message.flat is None]:
            self._inner.group._start_coalescing(self._device)
            for message in large:
                self._inner.call(message.op, [message.tensor], message.peer, message.tag)
            works.append(self._inner.group._end_coalescing(self._device))
        return works

    def check(self, timeout: float) -> None:
        """Raises what the guard finds, see `MessageGuard.check`."""
        self._guard.check(timeout)

    def close(self) -> None:
        """Leaves the streams to later groups: memory that was used on them may outlive this one."""
        _free.setdefault(self._device.index, []).extend(self._streams.values())
        self._streams.clear()
        self._last.clear()

    # Checks

    def _checked(self, name: str, tensors: Sequence[torch.Tensor], peer: int, tag: int = 0) -> _Message:
        """The message of a call."""
        if name == "recv_anysource":
            raise UsageError("recv of a CUDA tensor needs src: between GPUs a receive names its sender")
        if len(tensors) != 1:
            raise UsageError(f"{name} of {len(tensors)} tensors where a rank has one: make a call for each")
        tensor = tensors[0]
        if type(tensor) not in PLAIN and hasattr(tensor, "trigger_wait"):  # of a functional collective
            tensor = tensor.trigger_wait()
        self._operations.check_rank(peer)
        if type(tensor) not in PLAIN or tensor.layout != torch.strided:
            raise UsageError(f"{name} of a {type(tensor).__name__} of layout {tensor.layout}: give a plain tensor")
        check_memory(tensor, "the tensor to send" if name == "send" else "the tensor to recv")
        message = _Message(name, tensor.detach() if tensor.requires_grad else tensor, peer, tag)
        if self._kernels is not None and tensor.nbytes <= MESSAGE_NBYTES:
            whole = tensor.is_contiguous() and tensor.data_ptr() % _ALIGNED == 0
            plain = whole and not tensor.is_conj() and not tensor.is_neg()
            message.flat = message.tensor if plain else self._copy(message)
        elif not tensor.is_contiguous():
            raise UsageError(f"{name} of a tensor with gaps, of {tensor.nbytes} bytes: give .contiguous()")
        return message

    def _copy(self, message: _Message) -> torch.Tensor:
        """Aligned memory for a tensor with gaps, or one that begins anywhere."""
        flat = torch.empty(message.tensor.shape, dtype=message.tensor.dtype, device=self._device)
        return flat.copy_(message.tensor) if message.op == "send" else flat

    def _issued(self, message: _Message) -> None:
        tensor, numel = message.tensor, message.tensor.numel()
        by_kernel = message.flat is not None and numel > 0
        self._guard.issued(message.op, message.peer, message.tag, numel, tensor.dtype, not by_kernel)

    def _empty(self, message: _Message) -> MessageWork:
        """The Work of a message without elements, which is only compared."""
        return self._work([message], current_stream(self._device))

    # Launches

    def _stream(self, ways: tuple[tuple[str, int], ...]) -> torch.cuda.Stream:
        """The stream of launches of these operations and peers, in order after the last messages of each."""
        stream = self._streams.get(ways)
        if stream is None:
            free = _free.get(self._device.index)
            stream = self._streams[ways] = free.pop() if free else new_stream(self._device)
        for way in ways:
            last = self._last.get(way)
            if last is not stream:
                if last is not None:
                    stream.wait_stream(last)
                self._last[way] = stream
        return stream

    def _by_kernels(self, messages: Sequence[_Message]) -> list[MessageWork]:
        """The Works of messages, in one launch if that fits them. Lock held."""
        sends, receives = ([m.tensor.nbytes for m in messages if m.op == op] for op in ("send", "recv"))
        if self._kernels is not None and self._kernels.fit(sends, receives):
            return [self._launched(messages)]
        return [self._launched([message]) for message in messages]

    def _launched(self, messages: Sequence[_Message]) -> MessageWork:
        """The Work of one launch. Lock held."""
        assert self._kernels is not None
        stream = self._stream(tuple(dict.fromkeys([(message.op, message.peer) for message in messages])))
        self._before.record(current_stream(self._device))
        stream.wait_event(self._before)
        sides: dict[str, list[Side]] = {"send": [], "recv": []}
        for message in messages:
            assert message.flat is not None
            message.flat.record_stream(stream)
            sides[message.op].append(message.side)
        self._kernels.launch(stream.cuda_stream, sides["send"], sides["recv"])
        return self._work(messages, stream)

    def _work(self, messages: Sequence[_Message], stream: torch.cuda.Stream) -> MessageWork:
        """The Work of messages that have been moved once the stream has done what it has to do so far."""
        only = messages[0]
        source = only.peer if len(messages) == 1 and only.op == "recv" else -1
        copies = [
            (m.tensor, m.flat) for m in messages if m.op == "recv" and m.flat is not None and m.flat is not m.tensor
        ]
        return MessageWork([m.tensor for m in messages], Done(stream, self._events), source, self._check, copies)

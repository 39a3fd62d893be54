"""Calls on GPUs of one rank in one group: compared by the guard, then launched as kernels or left to an inner NCCL."""

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch

from unisono.backend.cuda_calls import KNOWN_AGAIN, call_of, devices_of, kernel_form, key_of, operation_of, strided
from unisono.backend.device_lists import flat_call
from unisono.backend.device_messages import MESSAGES, DeviceMessages
from unisono.backend.device_stalls import Stalls
from unisono.backend.device_start import made
from unisono.backend.device_work import LastStream, LaunchedWork, raw_stream
from unisono.backend.group import Group
from unisono.backend.inner import Inner
from unisono.backend.list_calls import LISTED, ListCalls
from unisono.backend.options import chosen
from unisono.backend.work import DONE
from unisono.errors import CollectiveTimeout, UnisonoError, UsageError
from unisono.gpu.defaults import gpu_default
from unisono.gpu.kernels import GpuCall, KernelCalls
from unisono.gpu.launching import Launch
from unisono.runtime.call import Call
from unisono.runtime.task import copy_error
from unisono.watch.device_order import order_word

__all__ = ["DeviceCalls", "Kind", "LaunchedWork"]

_Result = TypeVar("_Result")
_INTERVAL = 0.05  # s between two looks of the watcher
_KEPT = 2048
_NONE = -2  # no tensor's device
Kind = tuple[Launch | None, Call, bytes]
"""A kind of call: the launch, None if NCCL carries it; what peers compare, its header."""
_log = logging.getLogger("unisono")


class DeviceCalls:
    """``kernels``: whether its user wants them; the facts of all ranks decide (device_facts.py)."""

    def __init__(
        self, group: Group, store: Any, timeout: timedelta, kernels: bool, device: torch.device | None
    ) -> None:
        self._group, self._store, self._timeout, self._kernels_wanted = group, store, timeout, kernels
        self.device, self._options = device, group.options
        self.error: UnisonoError | None = None
        self._lock = threading.RLock()
        self._inner: Inner | None = None
        self.kernels: KernelCalls | None = None
        self.messages: DeviceMessages | None = None
        self._stalls: Stalls | None = None
        self._launches: dict[Any, Launch | None] = {}
        self._kinds: dict[Any, Kind] = {}
        self.lists = ListCalls(self)
        self.index = _NONE
        """Of the GPU, while calls on it can be known again."""
        self._failed: Any = (0,)  # the words of the kernels' failure record
        self._last = LastStream()
        self._closed = threading.Event()
        self._aborting: threading.Thread | None = None

    # The first call

    def start(self, device: torch.device) -> Inner:
        """Makes what calls need, with the first of them: collective over the group."""
        with self._lock:
            if self._inner is not None:
                return self._inner
            self.device = self.device or device
            parts = made(
                self._group, self._store, self._timeout, self.device, self._kernels_wanted, self.raise_failure
            )  # fmt: skip
            self._inner, self.kernels, self.messages = parts.inner, parts.kernels, parts.messages
            if parts.kernels is not None:
                self._failed = parts.kernels.workspace.failed
            self._stalls = Stalls(self._group.device_guard, parts.inner)
            self.index = self.device.index
            threading.Thread(target=_watch, args=(weakref.ref(self), self._closed), daemon=True).start()
            return parts.inner

    # A call

    def again(self, name: str, arguments: Sequence[Any], form: Any) -> Any:
        """The Work of a call of a kind that was made before, by its `KNOWN_AGAIN`; None if it is to go by `call`."""
        extra, source, output, options = form
        if source.get_device() != self.index or self._failed[0]:
            return None
        source_at = source.data_ptr()
        output_at = source_at if output is source else output.data_ptr()
        kind = self._kinds.get(key_of(name, extra, source, output, source_at | output_at, chosen(self._options)))
        if kind is None or not source_at or not output_at or not source.is_contiguous():
            return None
        if output is not source and not output.is_contiguous():
            return None
        if kind[0] is None:
            return self.by_nccl(kind, name, arguments)
        stream = self.launch(kind, source_at, output_at)
        return LaunchedWork([output], stream, self.raise_failure) if options.asyncOp else DONE

    def by_nccl(self, kind: Kind, name: str, arguments: Sequence[Any]) -> Any:
        """The Work of a call of a kind that NCCL carries."""
        with self._lock:
            self._issued(kind[1], kind[2])
        return self._inner.call(name, *arguments)  # type: ignore[union-attr]

    def _known(self, name: str, arguments: Sequence[Any], call: Call, launch: Launch | None) -> Kind:
        """A kind of call, from now on known again; ``launch``: None if NCCL carries it."""
        kind = self.kind(call, launch)
        if name in KNOWN_AGAIN and (known := KNOWN_AGAIN[name](*arguments)) is not None:
            if len(self._kinds) >= _KEPT:
                self._kinds.clear()
            extra, source, output, _ = known
            places, options = source.data_ptr() | output.data_ptr(), chosen(self._options)
            self._kinds[key_of(name, extra, source, output, places, options)] = kind
        return kind

    def call(self, name: str, arguments: Sequence[Any]) -> Any:
        """The Work of a call by torch's method ``name`` (canonical)."""
        self.raise_failure()
        if not self._group.joined:
            self._group.join(name)
        device = self._checked(name, arguments)
        inner = self.start(device)
        if name in MESSAGES:
            return self._messages(lambda messages: messages.call(name, arguments))
        if (tensors := strided(name, arguments)) is not None:
            return self._packed(name, arguments, *tensors)
        call = call_of(self._group.operations, name, arguments)
        with self._lock:
            try:
                launched = (self.lists.launched if name in LISTED else self._several)(name, arguments, call)
                if launched is None:
                    launched = self._launch(name, arguments, call)
            except UsageError as error:
                self.refuse(name, error, device)
                raise
            if launched is not None:
                return launched
            self._issued(call, self._known(name, arguments, call, None)[2])
        return inner.call(name, *arguments)

    def ready(self, name: str, tensors: Sequence[torch.Tensor]) -> KernelCalls | None:
        """The kernels of the group, for calls that are no methods of torch's; checks as `call` does."""
        self.raise_failure()
        if not self._group.joined:
            self._group.join(name)
        self.start(self._checked(name, tensors))
        return self.kernels

    def served(self, tensor: torch.Tensor) -> bool:
        """True for a tensor of the GPU whose kernels are ready, unless the group has failed."""
        return tensor.get_device() == self.index and self.kernels is not None and not self._failed[0]

    def failed(self) -> bool:
        """True once a kernel has failed: the next call is to raise."""
        return bool(self._failed[0])

    def by_name(self) -> bool:
        """True where an algorithm is chosen by name, which collectives run."""
        return chosen(self._options) is not None

    def kind(self, call: Call, launch: Launch | None) -> Kind:
        """A kind of call, to `launch`, or None if NCCL carries it."""
        return launch, call, self._group.device_guard.header(call)

    def launch(self, kind: Kind, *tensors: int) -> int:
        """Launches a kernel on the current stream, which it returns, in order after the last one, and after the guard.

        ``tensors``: addresses.
        """
        launch, call, header = kind
        assert launch is not None
        with self._lock:
            stream, last = raw_stream(self.index), self._last
            if stream != last.stream:
                last.follow(stream, self.device)
            self._group.device_guard.launched(call, header, 0 if last.captured else order_word(stream))
            launch(stream, *tensors)
        return stream

    def batch(self, calls: Sequence[tuple[str, torch.Tensor, int, int]]) -> list[Any]:
        """The Works of messages that are issued together, see `DeviceMessages.batch`."""
        if self._failed[0] or any(tensor.get_device() != self.index for _, tensor, _, _ in calls):
            self.ready("batch_isend_irecv", [tensor for _, tensor, _, _ in calls])
        return self._messages(lambda messages: messages.batch(calls))

    def _messages(self, issue: Callable[[DeviceMessages], _Result]) -> _Result:
        """What issuing messages gives; of what the guard finds the peers learn. A caller's mistake is its own."""
        assert self.messages is not None
        try:
            return issue(self.messages)
        except UsageError:
            raise
        except UnisonoError as error:
            with self._lock:
                self._fail(error)
            raise
        except RuntimeError:  # NCCL's, or of the store by which two ranks meet for their first message
            self.raise_failure()
            raise

    def _packed(self, name: str, arguments: Sequence[Any], source: torch.Tensor, output: torch.Tensor) -> Any:
        """A call on tensors with gaps: on contiguous copies, brought back in the order of the stream."""
        flat, result = source.contiguous(), torch.empty_like(output, memory_format=torch.contiguous_format)
        given = ([flat],) if output is source else (result, flat)
        work = self.call(name, [*given, *arguments[len(given) :]])
        work.wait()
        output.copy_(flat if output is source else result)
        stream = raw_stream(output.device.index)
        return LaunchedWork([output], stream, self.raise_failure) if arguments[-1].asyncOp else DONE

    def _checked(self, name: str, arguments: Sequence[Any]) -> torch.device:
        """The device of all tensors; raises `UsageError`, of which the peers learn, if it is not the group's."""
        found = devices_of(arguments)
        devices = list(found)
        wanted = self.device or devices[0]
        wrong = next((device for device in devices if device.type != "cuda" or device != wanted), None)
        if wrong is None:
            return wanted
        words = f"{name}: {found[wrong]} is on {wrong}, but the calls of {self._group.label} are on {wanted} here"
        error = UsageError(f"{words}: give tensors of one device")
        self.refuse(name, error, wanted)
        raise error

    def refuse(self, name: str, error: UsageError, device: torch.device) -> None:
        """Raises ``error``, a caller's mistake, of which the peers learn by the guard."""
        self.start(device)
        with self._lock:
            call = Call(operation_of(name), refused=str(error))
            self._issued(call, self._group.device_guard.header(call), error)

    def _issued(self, call: Call, header: bytes, instead: UnisonoError | None = None) -> None:
        """Lets the guard compare a call. Raises its error, or ``instead``; the group has then failed."""
        try:
            self._group.device_guard.issued(call, header)
        except UnisonoError as error:
            self._fail(instead or error)
            raise (instead or error) from None
        if instead is not None:
            self._fail(instead)
            raise instead

    def _several(self, name: str, arguments: Sequence[Any], call: Call) -> Any:
        """The Work of a call on several tensors that kernels serve by way of one; None for any other. Lock held."""
        size = self._group.size
        if self.kernels is None or not hasattr(arguments[-1], "asyncOp"):
            return None
        flat = flat_call(name, arguments, size)
        if flat is None or not (self.named(call)[0] or gpu_default(call.op, flat.nbytes, size, self.kernels.table)):
            return None
        with torch.no_grad():
            tensors = flat.pack()
            if self._launch(flat.name, [*tensors, arguments[-1]], call, again=False) is None:
                return None
            flat.deliver(tensors)
        stream = raw_stream(flat.outputs[0].device.index)
        return LaunchedWork(flat.outputs, stream, self.raise_failure) if arguments[-1].asyncOp else DONE

    def _launch(self, name: str, arguments: Sequence[Any], call: Call, again: bool = True) -> Any:
        """The Work of a call that kernels serve; None for any other. ``again``: it may come by `again`. Lock held."""
        form = kernel_form(name, arguments, self._group.size, *self.named(call)) if self.kernels is not None else None
        if form is None:
            return self._refuse_named(call)
        shape, source, output = form
        source_at, output_at = source.data_ptr(), output.data_ptr()
        launch = self.prepared(shape, call, (source_at | output_at) & 15 == 0)
        if launch is None:
            return None
        kind = self._known(name if again else "", arguments, call, launch)
        stream = self.launch(kind, source_at, output_at)
        return LaunchedWork([output], stream, self.raise_failure) if arguments[-1].asyncOp else DONE

    def prepared(self, shape: GpuCall, call: Call, aligned: bool) -> Launch | None:
        """The launch of a call, kept; None if NCCL carries it. See `KernelCalls.prepare`."""
        key = (shape, call.signature, aligned)
        try:
            return self._launches[key]
        except KeyError:
            assert self.kernels is not None
            if len(self._launches) >= _KEPT:
                self._launches.clear()
            launch = self._launches[key] = self.kernels.prepare(shape, call.checksum, aligned)
            return launch

    def named(self, call: Call) -> tuple[str, int]:
        """The algorithm that is chosen by name for a call, empty if none is, and its pieces."""
        options = chosen(self._options)
        return (options.name_for(call.op), options.chunks) if options is not None else ("", 1)

    def _refuse_named(self, call: Call) -> None:
        """Raises `UsageError` if an algorithm was chosen by name for a call that kernels do not run."""
        if self.named(call)[0]:
            raise UsageError(f"{call.describe()}: on GPUs here NCCL carries it, which takes no algorithm by name")

    # Failures

    def raise_failure(self) -> None:
        """Raises the error of the group if a call on GPUs has failed."""
        if self.error is None and self.kernels is not None and (failure := self.kernels.workspace.failure()):
            with self._lock:
                self._fail(self._explained(failure.peer))
        if self.error is not None:
            raise copy_error(self.error, f"this group has failed before and can only be destroyed: {self.error}")

    def _explained(self, peer: int) -> UnisonoError:
        """The error of a kernel that gave up over ``peer``: what comparing finds, or else what is known."""
        try:
            self._group.device_guard.compare()
            if self._stalls is not None:
                self._stalls.check(self._group.timeout)
            if self.messages is not None:
                self.messages.check(0.9 * self._group.timeout)
        except UnisonoError as error:
            return error
        name = self._group.global_ranks[peer]
        return CollectiveTimeout(f"a call of {self._group.label} on GPUs did not end: rank {name} did not arrive")

    def _fail(self, error: UnisonoError) -> None:
        """Ends all calls under way, here and, by what they wait for, at the peers."""
        if self.error is not None:
            return
        self.error, self.index = copy_error(error), _NONE
        self._group.monitor.failed(error)
        self._group.monitor.gave_up(error)
        if self.kernels is not None:
            self.kernels.workspace.end_kernels()
        if self._inner is not None:
            self._aborting = threading.Thread(target=self._inner.abort, daemon=True)
            self._aborting.start()

    def look(self) -> None:
        """Checks for mismatches, lost and late peers; of what it finds it writes to the log, for no call may follow."""
        with self._lock:
            guard = getattr(self._group, "device_guard", None)  # gone once the group is left, at exit for instance
            if self.error is not None or guard is None:
                return
            try:
                guard.check(self._group.timeout)
                if self.messages is not None:
                    self.messages.check(self._group.timeout)
                if self._stalls is not None:
                    self._stalls.check(self._group.timeout)
                if self.kernels is not None and (failure := self.kernels.workspace.failure()):
                    raise self._explained(failure.peer)
            except UnisonoError as error:
                self._fail(error)
                _log.error("%s: %s", type(error).__name__, error)

    def close(self) -> None:
        """Leaves the inner group."""
        self._closed.set()
        with self._lock:
            self.index = _NONE
            if self._aborting is not None:
                self._aborting.join()
            if self._inner is not None:
                self._inner.close(self._aborting is None)
            if self.messages is not None:
                self.messages.close()
            if self._stalls is not None:
                self._stalls.close()
            self._inner = self.kernels = self.messages = None
            self._launches.clear()
            self._kinds.clear()

    @property
    def group(self) -> Group:
        """The group whose calls these are."""
        return self._group

    @property
    def inner(self) -> Inner | None:
        """The inner group, once there is one."""
        return self._inner


def _watch(calls: "weakref.ref[DeviceCalls]", closed: threading.Event) -> None:
    """The watcher's thread: ends with the group."""
    while not closed.wait(_INTERVAL):
        found = calls()
        if found is None:
            return
        found.look()
        del found

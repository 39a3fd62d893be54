"""MPI in Gloo's place between hosts (`Options(between="mpi")`): messages by mpi4py over MPICH, Open MPI or Intel MPI.

A wait of MPI's own spins, so none of our threads may be in one: a thread per group polls the requests under way, at
short intervals while messages come and go. The ranks of a group have a communicator of their own, so that no message
meets one of another group or of the program's. Every rank must have been started by one mpiexec. Never imports torch.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from unisono.errors import UsageError, first_line
from unisono.transport.process import OwnThread

__all__ = ["MpiMessages", "connect_mpi", "load_mpi"]

_SHORT, _LONG = 20e-6, 1e-3  # s between two polls
_BUSY = 0.02  # s after a message, or a send, until polls are rarer
_ENDING = 0.5  # s that receives which are cancelled may take to end
_ALONE = "alone"
_mpi = threading.RLock()  # a library that serializes threads is enough
_abandoned: list[object] = []  # what MPI may still read or write


def load_mpi(needed: str, without: str = "") -> Any:
    """mpi4py's MPI. Raises `UsageError`, which begins with what is ``needed``; ``without``: what else would help."""
    try:
        from mpi4py import MPI
    except ImportError:
        raise UsageError(f'{needed}: mpi4py is not installed: pip install "unisono[mpi]"{without}') from None
    except RuntimeError as error:
        words = first_line(error)
        raise UsageError(
            f"{needed}: mpi4py finds no MPI library ({words}); set MPI4PY_LIBMPI to the libmpi.so of the MPI whose "
            "mpiexec this is"
        ) from None
    return MPI


def connect_mpi(store: Any, rank: int, size: int) -> "MpiMessages":
    """The messages of ``rank`` in a group of ``size``, all of which call this.

    Raises `UsageError`, on all ranks, if one of them was not started by mpiexec together with the others.
    """
    try:
        mpi = load_mpi("Options(between='mpi')")
        world = mpi.COMM_WORLD
        mine = world.Get_rank() if world.Get_size() >= size else _ALONE
    except UsageError as error:
        store.set(f"mpi/{rank}", str(error))
        raise
    store.set(f"mpi/{rank}", str(mine))
    found = [store.get(f"mpi/{each}").decode() for each in range(size)]
    if _ALONE in found or len(set(found)) < size:
        library = mpi.Get_library_version().partition("\n")[0].strip("\0 ")
        raise UsageError(
            f"Options(between='mpi'): the {size} ranks were not started by one mpiexec of the MPI that mpi4py has "
            f"loaded ({library}; its world has {world.Get_size()} of them): start them by mpiexec -n {size}; "
            "MPI4PY_LIBMPI names the libmpi.so of another one"
        )
    for each, words in enumerate(found):
        if not words.isdigit():
            raise UsageError(f"rank {each}: {words}")
    with _mpi:
        group = world.Get_group().Incl([int(number) for number in found])
        comm = world.Create_group(group)
        comm.Set_errhandler(mpi.ERRORS_RETURN)
    return MpiMessages(mpi, comm)


class _Message:
    """A message under way; `wait` returns once its buffer may be used. ``comes``: it is received."""

    def __init__(self, tensor: Any, comes: bool) -> None:
        self.tensor, self.comes, self.error = tensor, comes, ""
        self._over = threading.Event()

    def end(self, error: str = "") -> None:
        """Lets those go who wait for it, once."""
        if not self._over.is_set():
            self.error = error
            self._over.set()

    def wait(self, limit: timedelta) -> None:
        """Raises `RuntimeError` if it failed, or is not complete within a limit."""
        if not self._over.wait(min(limit.total_seconds(), threading.TIMEOUT_MAX)):
            raise RuntimeError("Timed out waiting for a message")
        if self.error:
            raise RuntimeError(self.error)


class MpiMessages:
    """Messages over a communicator ``comm``, with the methods of torch's ProcessGroupGloo that a `Mesh` calls."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._requests: list[Any] = []
        self._messages: list[_Message] = []
        self._begun: list[tuple[Any, _Message]] = []  # not yet seen by the thread
        self._hurry = 0.0  # until then polls are frequent
        self._ended = False
        self._thread = OwnThread(target=self._run, name="unisono MPI", daemon=True)
        self._thread.start()

    def send(self, tensors: Sequence[Any], peer: int, tag: int) -> _Message:
        """Sends one flat tensor of bytes, which must be left alone until the message is complete."""
        self._hurry = time.monotonic() + _BUSY
        return self._begin(self._comm.Isend, tensors[0], peer, tag)

    def recv(self, tensors: Sequence[Any], peer: int, tag: int) -> _Message:
        """Receives into one flat tensor of bytes, as many as come at most."""
        return self._begin(self._comm.Irecv, tensors[0], peer, tag, comes=True)

    def _begin(self, how: Any, tensor: Any, peer: int, tag: int, comes: bool = False) -> _Message:
        message = _Message(tensor, comes)
        try:
            with _mpi:
                request = how([tensor.numpy(), self._mpi.BYTE], peer, tag)
        except self._mpi.Exception as error:
            raise RuntimeError(str(error)) from error
        if request == self._mpi.REQUEST_NULL or self._ended:
            message.end("Connection closed" if self._ended else "")
        else:
            self._begun.append((request, message))
        return message

    def shut_down(self) -> None:
        """Ends every message under way."""
        self._ended = True
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._ended:
            self._take_begun()
            if self._poll():
                self._hurry = time.monotonic() + _BUSY
            else:
                time.sleep(_SHORT if time.monotonic() < self._hurry else _LONG)
        self._end_all()

    def _take_begun(self) -> None:
        while self._begun:
            request, message = self._begun.pop(0)
            self._requests.append(request)
            self._messages.append(message)

    def _end_all(self) -> None:
        """Ends every message; a receive that is cancelled is under way until MPI has ended it, too."""
        self._take_begun()
        for message in self._messages:
            message.end("Connection closed")
        with _mpi, suppress(self._mpi.Exception):
            for request, message in zip(self._requests, self._messages, strict=True):
                if message.comes:
                    request.Cancel()
        deadline = time.monotonic() + _ENDING
        while any(message.comes for message in self._messages) and time.monotonic() < deadline:
            if not self._poll():
                time.sleep(_SHORT)
        _abandoned.extend(zip(self._requests, self._messages, strict=True))

    def _poll(self) -> bool:
        """Ends the messages that are complete; returns whether there were any."""
        if not self._requests:
            return False
        try:
            with _mpi:
                done = self._mpi.Request.Testsome(self._requests) or []
        except self._mpi.Exception as error:
            for message in self._messages:
                message.end(f"{error}")
            self._requests, self._messages = [], []
            return True
        for k in done:
            self._messages[k].end()
        if done:
            gone = set(done)
            kept = [k for k in range(len(self._requests)) if k not in gone]
            self._requests = [self._requests[k] for k in kept]
            self._messages = [self._messages[k] for k in kept]
        return bool(done)

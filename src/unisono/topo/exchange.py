"""What hosts exchange about themselves before anything else works: JSON lines over plain TCP, with time limits.

Each host serves one port. A value is posted to one or several servers, which answer with what all hosts have posted for
that step, as soon as it is complete or the time is over. Under a launcher all post to one server, at MASTER_ADDR;
peers that name each other post to each other, so that one direction that works is enough. Nothing is unpickled, nothing
but text is kept, and lines are limited.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from unisono.errors import UsageError
from unisono.transport.process import OwnThread

__all__ = ["Exchange", "Values", "close", "connect", "listen", "serve", "why"]

Values = dict[str, Any]
"""What hosts have posted, by their keys."""
_LINE = 1 << 22  # bytes
_CONNECT_SECONDS, _PAUSE = 3.0, 0.1
_ENDING = 2.0  # s in which answers under way may still go out


def listen(port: int = 0) -> socket.socket:
    """A listening socket on a port of every interface, by default a free one. Raises `OSError` if it is taken."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=128)


def close(door: socket.socket) -> None:
    """Ends a listening socket, and with it a thread that waits for its connections."""
    with suppress(OSError):
        door.shutdown(socket.SHUT_RDWR)
    door.close()


def connect(address: str, port: int, seconds: float = _CONNECT_SECONDS) -> socket.socket:
    """A connection; raises `OSError`, see `why`."""
    return socket.create_connection((address, port), seconds)


def why(error: OSError) -> str:
    """The reason in words: ``timed out``, ``refused``, ``name does not resolve``, ``no route to host``."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, socket.gaierror):
        return "name does not resolve"
    return (os.strerror(error.errno) if error.errno else str(error)).lower()


def serve(door: socket.socket, answer: Callable[[socket.socket], None], name: str) -> None:
    """Answers the connections to a listening socket, each in a thread, until it is closed, which ends them."""

    def accept() -> None:
        with ExitStack() as ends:
            while True:
                try:
                    channel, _ = door.accept()
                except OSError:
                    return
                ends.callback(channel.close)
                OwnThread(target=answer, args=(channel,), daemon=True).start()

    OwnThread(target=accept, name=name, daemon=True).start()


class Exchange:
    """This host's server, and its posts to those of others; a context.

    ``key`` names this host's values, ``servers`` are the addresses to post to (none: its own alone). ``complete`` is
    asked whether the values of a step are all; a step lasts ``seconds`` at most. Raises `UsageError` if the port is
    taken.
    """

    def __init__(
        self, key: str, port: int, servers: Sequence[str], complete: Callable[[str, Values], bool], seconds: float
    ) -> None:
        self.key, self.port, self.servers, self.seconds = key, port, list(servers), seconds
        self.failures: dict[str, str] = {}
        """Why the last step's posts to a server failed, by its address."""
        self._complete, self._steps, self._until = complete, dict[str, Values](), dict[str, float]()
        self._news = threading.Condition()
        self._answering = self._posting = 0
        try:
            self._door = listen(port)
        except OSError as error:
            raise UsageError(
                f"port {port} of {socket.gethostname()} can not be listened on ({why(error)}): another run may have "
                "it; name a free one, the same on all hosts, by --port"
            ) from None

    def __enter__(self) -> "Exchange":
        serve(self._door, self._answer, "unisono serves facts")
        return self

    def __exit__(self, *details: object) -> None:
        with self._news:
            self._news.wait_for(lambda: not self._answering, _ENDING)
        close(self._door)

    def gather(self, step: str, value: Any) -> Values:
        """Posts a value; the values of all hosts that have posted theirs for this step in time."""
        self.failures = {}
        self._put(step, {self.key: value})
        posts = [OwnThread(target=self._post, args=(each, step, value), daemon=True) for each in self.servers]
        with self._news:
            self._posting = len(posts)
        for post in posts:
            post.start()
        return self._gathered(step)

    def _gathered(self, step: str, answering: bool = False) -> Values:
        """The values of a step, once they are complete, or its time and that of the posts is over."""
        with self._news:
            while not self._complete(step, self._steps[step]):
                left = self._until[step] - time.monotonic()
                if self.servers and not answering:
                    if not self._posting:
                        break
                    left = self.seconds
                elif left <= 0:
                    break
                self._news.wait(left)
            return dict(self._steps[step])

    def _put(self, step: str, values: Mapping[str, Any]) -> None:
        with self._news:
            self._steps.setdefault(step, {}).update(values)
            self._until.setdefault(step, time.monotonic() + self.seconds)
            self._news.notify_all()

    def _post(self, address: str, step: str, value: Any) -> None:
        """Posts to one server, until it answers or the time is over; one that is not there yet is tried again."""
        line = json.dumps({"step": step, "key": self.key, "value": value}).encode() + b"\n"
        deadline = time.monotonic() + self.seconds
        try:
            while (left := deadline - time.monotonic()) > 0:
                try:
                    with connect(address, self.port, min(left, _CONNECT_SECONDS)) as channel:
                        channel.settimeout(self.seconds + _ENDING)  # the server may have begun to wait just now
                        channel.sendall(line)
                        answer = _line(channel)
                    self._put(step, answer["values"])
                    self.failures.pop(address, None)
                    return
                except (OSError, ValueError, KeyError, TypeError) as error:
                    self.failures[address] = why(error) if isinstance(error, OSError) else "answers, but not as unisono"
                time.sleep(min(_PAUSE, max(0.0, left)))
        finally:
            with self._news:
                self._posting -= 1
                self._news.notify_all()

    def _answer(self, channel: socket.socket) -> None:
        """Takes what a host posts, and answers once all have; anything else that comes is dropped."""
        with channel, suppress(OSError, ValueError, KeyError, TypeError):
            channel.settimeout(self.seconds)
            posted = _line(channel)
            step, key = str(posted["step"]), str(posted["key"])
            with self._news:
                self._answering += 1
            try:
                self._put(step, {key: posted["value"]})
                values = self._gathered(step, answering=True)
                channel.sendall(json.dumps({"values": values}).encode() + b"\n")
            finally:
                with self._news:
                    self._answering -= 1
                    self._news.notify_all()


def _line(channel: socket.socket) -> Any:
    """The JSON in one line from a peer; raises `ValueError` if it is none, or too long, `OSError` if it breaks off."""
    with channel.makefile("rb") as file:
        line = file.readline(_LINE)
    if not line:
        raise ConnectionError("closed without an answer")
    if not line.endswith(b"\n"):
        raise ValueError("too long")
    return json.loads(line)

"""Questions of one rank to ranks of other hosts, and their answers, of any length.

What can be asked is known by name. An answer is made by the thread that receives from the asker, whatever the rank is
in; who asks may wait for it, or be called with it.
"""

import itertools
import struct
import threading
import time
from collections.abc import Callable, Iterable

__all__ = ["Questions"]

_ASKED = struct.Struct("<IB")  # number of the question, bytes of the name
_ANSWERED = struct.Struct("<IB")  # number of the question, whether this is the last part


class Questions:
    """The questions of this rank. ``send_question`` and ``send_answer(peer, body)`` send a frame of ``room`` bytes."""

    def __init__(
        self, room: int, send_question: Callable[[int, bytes], None], send_answer: Callable[[int, bytes], None]
    ) -> None:
        self._room, self._send_question, self._send_answer = room, send_question, send_answer
        self.answers: dict[str, Callable[[bytes], bytes]] = {}
        """By name, what answers; it may take some tenths of a second."""
        self._numbers = itertools.count()
        self._open: dict[int, tuple[list[bytes], Callable[[bytes], None]]] = {}
        self._answered = threading.Condition()

    def ask(self, peer: int, name: str, body: bytes, then: Callable[[bytes], None]) -> None:
        """Sends a question; calls ``then`` with the answer, if one comes."""
        number = next(self._numbers) & 0xFFFF_FFFF
        self._open[number] = ([], then)
        self._send_question(peer, _ASKED.pack(number, len(name)) + name.encode() + body)

    def ask_all(self, peers: Iterable[int], name: str, body: bytes, patience: float) -> dict[int, bytes]:
        """Asks several ranks the same; the answers that come within ``patience`` seconds."""
        found: dict[int, bytes] = {}
        asked = list(peers)

        def note(peer: int, answer: bytes) -> None:
            with self._answered:
                found[peer] = answer
                self._answered.notify_all()

        for peer in asked:
            self.ask(peer, name, body, lambda answer, peer=peer: note(peer, answer))  # type: ignore[misc]
        deadline = time.monotonic() + patience
        with self._answered:
            self._answered.wait_for(lambda: len(found) == len(asked), max(0.0, deadline - time.monotonic()))
            return dict(found)

    def close(self) -> None:
        """Forgets who answers and who has asked: they hold the group's memory."""
        self._send_question = self._send_answer = lambda peer, body: None
        self.answers.clear()
        self._open.clear()

    def asked(self, peer: int, body: memoryview) -> None:
        """Answers a question that has come."""
        number, nbytes = _ASKED.unpack_from(body)
        name = bytes(body[_ASKED.size : _ASKED.size + nbytes]).decode()
        answer = self.answers.get(name)
        data = answer(bytes(body[_ASKED.size + nbytes :])) if answer is not None else b""
        most = self._room - _ANSWERED.size
        for at in range(0, max(1, len(data)), most):
            part = data[at : at + most]
            self._send_answer(peer, _ANSWERED.pack(number, at + most >= len(data)) + part)

    def answered(self, body: memoryview) -> None:
        """Takes an answer, or a part of one."""
        number, last = _ANSWERED.unpack_from(body)
        parts, then = self._open.get(number, ([], lambda answer: None))
        parts.append(bytes(body[_ANSWERED.size :]))
        if last:
            self._open.pop(number, None)
            then(b"".join(parts))

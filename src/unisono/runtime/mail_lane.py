"""The lane of messages with compiled loops (compiled_messages.py), wherever these serve; the long way does the rest.

What is waited for goes in one call of the loops. What is not goes as far as it can when it is issued; whoever waits
then carries all that is under way together, both ways at once.
"""

import time
from collections.abc import Sequence

import torch

from unisono.errors import UnisonoError
from unisono.runtime.mail import Job, Mail
from unisono.runtime.message import Arriving, Letter, Message
from unisono.runtime.message_words import OTHER, SILENT
from unisono.runtime.point_to_point import PointToPointLane
from unisono.runtime.reentry import interruption
from unisono.runtime.task import BRIEFLY, brief
from unisono.transport import futex
from unisono.transport.inference import outside_inference
from unisono.transport.segment import Segment
from unisono.watch.call import Call, call_site, name_of_dtype

__all__ = ["MailLane"]

_NAP = 0.05  # s: how long a receive sleeps before it takes the long way, where all is looked after


class MailLane(PointToPointLane):
    """All messages of one rank in one group."""

    def __init__(self, segment: Segment, rank: int, names: Sequence[int], label: str) -> None:
        super().__init__(segment, rank, names, label)
        self._mail = Mail(segment, rank)

    def compiled(
        self, letter: Letter, peer: int, tensor: torch.Tensor, timeout: float, background: bool
    ) -> Message | None:
        """Carries a message to or from ``peer`` in compiled loops; None if there are none, nothing done.

        A message of which only a part has moved by then is under way like any other, in the ``background`` or until
        it is done.
        """
        if not self._mail.ready():
            return None
        naps = letter.call.op == "recv" and not background and timeout > 2 * _NAP
        end = time.monotonic() + _NAP * naps
        while True:
            heard = self._bells[self._rank].value()
            message = self._at_once(letter, peer, tensor, timeout, background)
            if message is not _SILENT or (left := end - time.monotonic()) <= 0:
                break
            self._mail.nap(heard, int(1e9 * left))
        if message is None or message is _SILENT:
            message = Message(letter.call, letter, peer, letter.tag, [tensor], timeout)
            self.submit(message, background)
        elif not message.done:
            try:
                if background:
                    message.site = call_site()
                    self._locate(message, message.site)
                    self._wake_worker()
                else:
                    self.finish(message, held=False)
            except UnisonoError:
                raise
            except BaseException as error:  # nobody can take it up again
                self.abandon(message, error)
                raise
        return message

    def _at_once(
        self, letter: Letter, peer: int, tensor: torch.Tensor, timeout: float, background: bool
    ) -> Message | None:
        """What has become of a message by the end of the loop's patience; `_SILENT` if its peer did not stir."""
        if self.entered():
            self._alone(letter.call)
        sends, inbox = letter.call.op == "send", self._in[peer]
        with self._lock:
            free = not (self._sends[peer] if sends else self._posted or any(self._sends) or inbox.occupied)
            if self.failed is not None or not free:
                return None
            patience = futex.LINGER
            if background:
                patience = 0.0 if sends else BRIEFLY if inbox.ring.silent() else brief(letter.call)
            try:
                began = time.monotonic_ns()
                moved = self._mail.carry(letter, peer, tensor.data_ptr(), int(1e9 * patience))
                if moved < 0:
                    return _SILENT if moved == SILENT else None
                self._out[peer].heads += sends
                if moved == letter.nbytes:
                    self._flight.moved(letter.call, peer, letter.tag, began)
                    if not (sends and background):
                        return _ENDED
                return self._rest(letter, peer, tensor, timeout, moved)
            except BaseException as error:
                self._give_up(interruption(error))
                raise

    def _rest(self, letter: Letter, peer: int, tensor: torch.Tensor, timeout: float, moved: int) -> Message:
        """A message of which ``moved`` bytes are through, as one under way; or as a send whose refusal may follow."""
        message = Message(letter.call, letter, peer, letter.tag, [tensor], timeout)
        message.started, message.moved = True, moved
        if letter.call.op == "send":
            message.number = self._out[peer].heads
            if moved == letter.nbytes:
                message.done = True
                return message
            self._sends[peer].append(message)
        message.note = self._flight.issue(letter.call, peer, letter.tag)
        if letter.call.op == "recv":
            message.wanted = True  # by the loop
            self._begin(message, peer, moved)
        return message

    def _begin(self, message: Message, peer: int, moved: int) -> Arriving:
        """The loops have opened the message from ``peer`` that a receive waits for, and taken ``moved`` bytes of it."""
        inbox, call, data = self._in[peer], message.call, message.data
        number, dtype = inbox.ring.opened(0), name_of_dtype(call.dtype)
        arriving = Arriving(message.tag, data.numel(), call.numel, dtype, number, data, message, moved, owed=0)
        inbox.current = arriving
        return arriving

    @outside_inference
    def _carry(self, linger: bool) -> None:
        found = self._jobs() if self._mail.there else None
        if found is None:
            super()._carry(linger)
        elif found:
            patience = int(1e9 * futex.LINGER) if linger else 0
            told, self._heard = self._mail.carry_all([job for _, job in found], patience)
            for (each, _), job in zip(found, told, strict=True):
                self._moved(each, job)

    def _jobs(self) -> list[tuple[Message | Arriving, Job]] | None:
        """What can go at this moment: the next message to each peer and from each; None where loops do not serve."""
        found: list[tuple[Message | Arriving, Job]] = [(queue[0], _job(queue[0])) for queue in self._sends if queue]
        busy = set()
        for peer, inbox in enumerate(self._in):
            if (arriving := inbox.current) is not None:
                if arriving.into is None:
                    return None
                busy.add(peer)
                found.append((arriving, (0, peer, 0, arriving.into.data_ptr(), arriving.nbytes, arriving.moved, 1)))
        for message in self._posted:
            if message.peer is None:
                return None
            if message.peer not in busy:
                busy.add(message.peer)
                found.append((message, _job(message)))
        return found

    def _moved(self, each: Message | Arriving, job: Job) -> None:
        """Takes note of what the loops have done."""
        sends, peer, _, _, nbytes, moved, begun = job
        done = begun == 1 and moved == nbytes
        if isinstance(each, Arriving):
            each.moved = moved
        elif sends:
            each.moved = moved
            if begun and not each.started:
                self._out[peer].heads += 1
                each.started, each.number = True, self._out[peer].heads
        elif begun == OTHER:
            self._pull(peer)
        elif begun:
            self._posted.remove(each)
            each = self._begin(each, peer, moved)
        if done and isinstance(each, Arriving):
            self._arrived(peer, each)
        elif done:
            self._end_message(self._sends[peer].popleft())


def _job(message: Message) -> Job:
    """A send, or a receive that has not begun yet, for the loops."""
    letter, at = message.lettered()
    assert message.peer is not None
    sends = int(message.call.op == "send")
    return sends, message.peer, letter.head, at, letter.nbytes, message.moved, int(message.started)


def _sign() -> Message:
    message = Message(Call("send"), torch.empty(0, dtype=torch.uint8), 0, 0, [], 0.0)
    message.done = True
    return message


_ENDED, _SILENT = _sign(), _sign()
"""Stand for every message that was done at once, or of which nothing has moved."""

"""Exit notes: published by a rank that aborts or leaves; and the delay of its end after the peers it lost.

An exit note is the first cause, then the rank's own words. A rank that gives up over the loss of another is itself
waited for, and so on: a rank that reads of it at third hand must still read who was lost first. So the first cause
travels by itself, ahead of everything else and unaltered, however often it is passed on; what each rank adds of its own
is not passed on.

A rank that fails over the loss of a peer ends after that peer, so that launchers blame the one that failed first.
torchrun polls its ranks, takes for the first failure the one with the earliest time, to the second, and among equals
the one that it found ended first; ``multiprocessing`` takes the first process that it finds ended. A rank reads of a
lost peer as soon as that says so or is dead, while the peer may take long to end, and longer to be seen. So a rank that
ends over it stays until that process has been collected, or this one is ended. On a busy machine an interpreter takes
many seconds to end, most of which it waits for a core: they do not count against the time that a lost peer has for it.

The time of a failure that went through torch's ``record`` is that in its error file; of any other it is when torchrun
has found the process ended, which may be later than what a rank that read of it has recorded. So that is put off too.
Never imports torch.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from unisono.errors import PeerLostError
from unisono.runtime.monitor import Loss
from unisono.transport.process import Identity, alive, run_delay, uncollected

__all__ = ["as_sentence", "exit_note", "follow", "lost", "put_off", "read_exit_note", "short", "stay"]

_EACH, _ALL = 400, 1200  # characters of one cause, and of all causes, that are passed on
_LONG = 200  # characters that are not said twice


def short(text: str, limit: int) -> str:
    """The text, cut to ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def exit_note(words: str, cause: str = "") -> str:
    """The text of a note: ``cause``, if another rank is to blame, on a line of its own before the ``words``."""
    return f"{short(cause, _ALL)}\n{words}"


def read_exit_note(text: str) -> Loss:
    """The `exit_note` of a rank, parsed; empty if there is none."""
    cause, _, words = text.partition("\n")
    return Loss(words, cause)


def as_sentence(text: str) -> str:
    """An `exit_note` as one sentence."""
    words, cause, _ = read_exit_note(text)
    return f"{words} ({cause})" if cause and cause not in words else words


def _once(texts: Sequence[str]) -> list[str]:
    """Texts such as ``rank 0 (pid 80 on node1) ended …``; what several ranks say alike at length is quoted once."""
    alike: dict[str, list[str]] = {}
    for text in texts:
        rest = text.partition(") ")[2]
        alike.setdefault(rest if len(rest) > _LONG else text, []).append(text)
    return [
        "; likewise ".join([first, *(text.removesuffix(f" {rest}") for text in others)])
        for rest, (first, *others) in alike.items()
    ]


def lost(what: str, losses: Sequence[Loss]) -> PeerLostError:
    """The error of a call that can not end (``what`` says which): first causes, then ranks that aborted over them.

    If this process ends by it, it does so after those.
    """
    blamed = [loss for loss in losses if not loss.cause] or losses
    follow(loss.who for loss in blamed if loss.who is not None)
    first = dict.fromkeys(loss.cause or loss.words for loss in losses)
    later = dict.fromkeys(loss.words for loss in losses if loss.cause)
    texts = _once([*first, *(words for words in later if words not in first)])
    error = PeerLostError(f"{what}: {'; '.join(texts)}")
    error.cause = short("; ".join(short(" ".join(cause.splitlines()), _EACH) for cause in first), _ALL)
    return error


_ENDING = 5.0  # s from the loss on: how long a lost peer may take to end while it does not wait for a core
_BUSY = 60.0  # s: how much longer, if it does
_SEEN = 2.0  # s from its end on: how long its parent may take to collect it
_PAUSE = 0.005  # s

_lost: dict[Identity, tuple[float, float]] = {}  # when this process read of it, and its run delay then
_dated = 0  # s since the epoch: the time that this process's recorded failure has been given


def follow(peers: Iterable[Identity]) -> None:
    """Records processes as lost to this one, which does not end by an error before them."""
    for peer in peers:
        _lost.setdefault(peer, (time.monotonic(), run_delay(peer)))


def _deadline(peer: Identity) -> float:
    """Until when a lost peer may take to end, as far as is known by now."""
    read, delay = _lost[peer]
    return read + _ENDING + min(max(0.0, run_delay(peer) - delay), _BUSY)


def put_off() -> None:
    """Dates a recorded failure of this process a second ahead if it has lost peers of late."""
    global _dated
    path, moment = os.environ.get("TORCHELASTIC_ERROR_FILE"), int(time.time()) + 1
    if path and moment > _dated and any(time.monotonic() < _deadline(peer) + _SEEN for peer in _lost):
        _dated = moment
        with suppress(OSError, ValueError, LookupError, TypeError):  # nothing is recorded, or not by torch
            _date(path, moment)


def _date(path: str, moment: int) -> None:
    with open(path) as file:
        failure = json.load(file)
    failure["message"]["extraInfo"]["timestamp"] = str(moment)
    with open(f"{path}.later", "w") as file:
        json.dump(failure, file)
    os.replace(file.name, path)  # at once, for this process may be killed at any moment


def stay() -> None:
    """Returns once the lost peers have ended and been collected, or have had the time for it; a second time at once."""
    put_off()
    try:
        ended = [peer for peer in _lost if _until_not(alive, peer, _deadline)]
        seen = time.monotonic() + _SEEN
        for peer in ended:
            _until_not(uncollected, peer, lambda _: seen)
    finally:
        _lost.clear()


def _until_not(true: Callable[[Identity], bool], peer: Identity, deadline: Callable[[Identity], float]) -> bool:
    """True once it is true of the process no more, False at its deadline."""
    while (still := true(peer)) and time.monotonic() < deadline(peer):
        time.sleep(_PAUSE)
        put_off()
    return not still


os.register_at_fork(after_in_child=_lost.clear)

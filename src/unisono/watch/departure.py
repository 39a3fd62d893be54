"""A rank that fails over the loss of a peer ends after that peer, so that launchers blame the one that failed first.

Launchers go by what they see. torchrun polls its ranks, takes for the first failure the one with the earliest time, to
the second, and among equals the one that it found ended first; ``multiprocessing`` takes the first process that it
finds ended. A rank reads of a lost peer as soon as that says so or is dead, while the peer may take long to end, and
longer to be seen. So a rank that ends over it stays until somebody has collected that process, or ended this one.

The time of a failure that went through torch's ``record`` is that in its error file; of any other it is when torchrun
has found the process ended, which may be later than what a rank that read of it has recorded. So that is put off too.
Never imports torch.
"""

import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from unisono.transport.process import Identity, alive, uncollected

__all__ = ["follow", "put_off", "stay"]

_ENDING = 5.0  # s from the loss on: how long a lost peer may take to end
_SEEN = 2.0  # s from its end on: how long its parent may take to collect it
_PAUSE = 0.005  # s

_lost: dict[Identity, float] = {}  # when this process read of it
_dated = 0  # s since the epoch: the time that this process's recorded failure has been given


def follow(peers: Iterable[Identity]) -> None:
    """These processes are lost to this one, which shall not end by an error before them."""
    for peer in peers:
        _lost.setdefault(peer, time.monotonic())


def put_off() -> None:
    """Dates a recorded failure of this process a second ahead if it has lost peers of late."""
    global _dated
    path, moment = os.environ.get("TORCHELASTIC_ERROR_FILE"), int(time.time()) + 1
    if path and moment > _dated and any(time.monotonic() < read + _ENDING + _SEEN for read in _lost.values()):
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
        ended = [peer for peer, read in _lost.items() if _until(_ended, peer, read + _ENDING)]
        deadline = time.monotonic() + _SEEN
        for peer in ended:
            _until(_seen, peer, deadline)
    finally:
        _lost.clear()


def _until(true: Callable[[Identity], bool], peer: Identity, deadline: float) -> bool:
    while not (found := true(peer)) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
        put_off()
    return found


def _ended(peer: Identity) -> bool:
    return not alive(peer)


def _seen(peer: Identity) -> bool:
    return not uncollected(peer)


os.register_at_fork(after_in_child=_lost.clear)

"""What a rank leaves for the others when it gives up or goes: the first cause, then its own words.

A rank that gives up over the loss of another is itself waited for, and so on: whoever hears of it at third hand must
still read who was lost first. So the first cause travels by itself, ahead of everything else and unaltered, however
often it is passed on; what each rank adds of its own is not passed on. Never imports torch.
"""

from collections.abc import Sequence
from typing import NamedTuple

from unisono.errors import PeerLostError, UnisonoError
from unisono.transport.process import Identity
from unisono.watch.departure import follow

__all__ = ["Loss", "farewell", "first_line", "lost", "read_farewell", "same", "short", "spoken"]

_EACH, _ALL = 400, 1200  # characters of one cause, and of all causes, that are passed on
_LONG = 200  # characters that are not said twice


class Loss(NamedTuple):
    """Why a rank will never come: ``words`` on the rank; ``cause``, what it gave up over, empty if it is the first.

    ``who`` is its process, if known.
    """

    words: str
    cause: str = ""
    who: Identity | None = None


def short(text: str, limit: int) -> str:
    """The text, cut to ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without the colon that leads to the next."""
    return str(error).partition("\n")[0].rstrip(":")


def farewell(words: str, cause: str = "") -> str:
    """The text to leave behind: ``cause``, if another rank is to blame, on a line of its own before the ``words``."""
    return f"{short(cause, _ALL)}\n{words}"


def read_farewell(text: str) -> Loss:
    """What a rank left behind with `farewell`; empty if it left nothing."""
    cause, _, words = text.partition("\n")
    return Loss(words, cause)


def spoken(text: str) -> str:
    """A `farewell` as one sentence."""
    words, cause, _ = read_farewell(text)
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
    """The error of a call that can not end (``what`` says which): first causes first, then who gave up over them.

    If this process ends by it, it does so after those.
    """
    blamed = [loss for loss in losses if not loss.cause] or losses
    follow(loss.who for loss in blamed if loss.who is not None)
    first = dict.fromkeys(loss.cause or loss.words for loss in losses)
    later = dict.fromkeys(loss.words for loss in losses if loss.cause)
    told = _once([*first, *(words for words in later if words not in first)])
    error = PeerLostError(f"{what}: {'; '.join(told)}")
    error.cause = short("; ".join(short(" ".join(cause.splitlines()), _EACH) for cause in first), _ALL)
    return error


def same(error: UnisonoError) -> UnisonoError:
    """A copy to keep and to raise again: what has been raised collects a traceback, and with it memory."""
    copy = type(error)(*error.args)
    copy.cause = error.cause
    return copy

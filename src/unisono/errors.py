"""The errors unisono raises, and whose fault each of them is.

    UnisonoError
    ├── UsageError          the caller's mistake, known on one rank alone      (also a ValueError)
    ├── MismatchError       the ranks disagree about a call
    ├── PeerLostError       another rank's process is gone
    ├── DeadlockError       ranks wait for each other in a cycle
    ├── CollectiveTimeout   a call did not end in time                         (also a TimeoutError)
    ├── UpdateError         a weight update was given up over a failure on another rank
    │   └── CorruptionError a tensor's checksum is not that of its version
    └── ScheduleError       a schedule does not do what it says                (also a ValueError)

Every message carries the values: ranks, call, sequence number, what was expected, what came, and the remedy if there
is one. torch.distributed users catch RuntimeError around collectives, so the whole tree derives from it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

__all__ = [
    "CollectiveTimeout",
    "CorruptionError",
    "DeadlockError",
    "MismatchError",
    "PeerLostError",
    "ScheduleError",
    "UnisonoError",
    "UpdateError",
    "UsageError",
    "check_known",
    "file_errors",
    "first_line",
    "kind_and_text",
]


class UnisonoError(RuntimeError):
    """Anything that unisono refuses, finds or reports.

    ``cause`` names the first cause where that is the loss of another rank, for the ranks that wait for this one.
    """

    cause = ""


class UsageError(UnisonoError, ValueError):
    """The caller's mistake, visible on one rank alone: a bad argument, a wrong device, an unknown name."""


class MismatchError(UnisonoError):
    """The ranks of a group disagree: other operations, dtypes, shapes, roots or reduce ops in one call."""


class PeerLostError(UnisonoError):
    """A rank that this call needs has died or left the group."""


class DeadlockError(UnisonoError):
    """Ranks wait for each other in a cycle that can never end."""


class CollectiveTimeout(UnisonoError, TimeoutError):
    """A call did not end within its time; the message says who is missing and what they do."""


class UpdateError(UnisonoError):
    """A weight update was given up: another rank raised in it; the message quotes that and names the version kept."""


class CorruptionError(UpdateError):
    """Tensors whose checksums are not those of their version, on the way or in a replica's memory."""


class ScheduleError(UnisonoError, ValueError):
    """A schedule that loses, doubles, races or deadlocks; the message lists every finding."""


def check_known(what: str, name: object, known: Iterable[str]) -> None:
    """Raise UsageError, which lists what there is, for a name that is not among them; `what` is its kind."""
    if name not in (names := tuple(known)):
        raise UsageError(f"unknown {what} {name!r}: expected one of {', '.join(names)}")


@contextmanager
def file_errors(what: str) -> Iterator[None]:
    """Raise UsageError, such as `cannot write a.json: Permission denied`, for an OSError in the block."""
    try:
        yield
    except OSError as problem:
        raise UsageError(f"cannot {what}: {problem.strerror or problem}") from None


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without the colon that leads to the next; its kind if there is none."""
    return str(error).partition("\n")[0].rstrip(":") or type(error).__name__


def kind_and_text(error: BaseException) -> str:
    """An error as Python shows it last: its kind, and its text if it has any."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

"""What the ranks of a default group exchange when it is made: their versions, and on which machine they are.

And the words where two processes are one rank.
"""

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from unisono.errors import MismatchError, PeerLostError, UnisonoError, UsageError
from unisono.transport.host import Host
from unisono.transport.segment import StoreLike
from unisono.units import name_ranks

__all__ = [
    "check_versions", "claimed_twice", "publish_self", "ranks_here", "versions", "wait_for_readers",
    "wait_for_readers_of",
]  # fmt: skip

_PACKAGES = ("unisono", "torch")
_READING = 1.0  # s


def versions() -> dict[str, str]:
    """The versions that must be equal on all ranks; a build (``+cpu``) is none of them."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            found[package] = "of a source tree"
    return found


def claimed_twice(name: int, label: str, pid: int, hostname: str = "") -> UsageError:
    """The error of a process that is global rank ``name`` of a group, as process ``pid`` on ``hostname`` is.

    ``pid`` 0: it is not known; ``hostname`` empty: this one.
    """
    here = socket.gethostname()
    return UsageError(
        f"rank {name} of {label} is claimed twice: by pid {os.getpid()} on {here} and by pid {pid or 'unknown'} on "
        f"{hostname or here}; give every process its own rank"
    )


def publish_self(store: StoreLike, rank: int) -> None:
    """Publishes what the others compare, before this rank joins: that of an earlier attempt is replaced."""
    store.set(f"birth/{rank}", json.dumps([versions(), Host.mine().boot]))


def ranks_here(
    store: StoreLike, rank: int, global_ranks: Sequence[int], label: str, compared: bool = False
) -> list[int]:
    """The group ranks on this rank's machine, once all have joined: containers of one kernel share its cores.

    Raises `MismatchError` as `check_versions` does, unless these were ``compared`` before.
    """
    published = _published(store, len(global_ranks))
    if not compared:
        _compare([each for each, _ in published], global_ranks, label)
    return [each for each, (_, boot) in enumerate(published) if boot == published[rank][1]]


def wait_for_readers(store: StoreLike, rank: int, size: int, nonce: str) -> None:
    """Returns on the first rank, whose process may serve the store, once all ranks of the group ``nonce`` have read
    there, or after a second: it may leave at once, and the store with it.
    """
    key, deadline = f"birth/read/{nonce}", time.monotonic() + _READING
    read = store.add(key, 1)
    while rank == 0 and read < size and time.monotonic() < deadline:
        time.sleep(0.001)
        read = store.add(key, 0)


def wait_for_readers_of(error: BaseException, store: StoreLike, rank: int, size: int) -> None:
    """The same where the group is not made: the first rank waits if ``error``, its own, is what the others are to read.

    It waits for nobody over a timeout, a lost peer, or an interrupt.
    """
    if isinstance(error, UnisonoError) and (rank or isinstance(error, UsageError | MismatchError)):
        with suppress(PeerLostError):  # the store has gone
            wait_for_readers(store, rank, size, "failed")


def check_versions(store: StoreLike, global_ranks: Sequence[int], label: str) -> None:
    """Raises `MismatchError`, on every rank, if the versions of some differ; all have published themselves."""
    _compare([each for each, _ in _published(store, len(global_ranks))], global_ranks, label)


def _published(store: StoreLike, size: int) -> list[tuple[dict[str, str], str]]:
    return [json.loads(store.get(f"birth/{each}")) for each in range(size)]


def _compare(found: Sequence[dict[str, str]], global_ranks: Sequence[int], label: str) -> None:
    wrong = [package for package in _PACKAGES if len({each[package] for each in found}) > 1]
    if wrong:
        lines = [
            f"{_who(package, found, global_ranks)}: pip install {package}=={found[0][package]}" for package in wrong
        ]
        raise MismatchError(f"the ranks of {label} run different versions of {'; of '.join(lines)} everywhere")


def _who(package: str, found: Sequence[dict[str, str]], global_ranks: Sequence[int]) -> str:
    """A package, and which ranks have which version of it."""
    ranks: dict[str, list[int]] = {}
    for name, each in zip(global_ranks, found, strict=True):
        ranks.setdefault(each[package], []).append(name)
    return f"{package} ({', '.join(f'{name_ranks(names)}: {text}' for text, names in ranks.items())})"

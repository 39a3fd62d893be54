"""What the ranks of a default group exchange when it is made: their versions, and on which machine they are.

And the words where two processes are one rank.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from unisono.backend.stores import JobStore
from unisono.errors import MismatchError, PeerLostError, UsageError
from unisono.transport.host import Host
from unisono.transport.memory_store import MemoryStore
from unisono.transport.segment import StoreLike
from unisono.units import name_ranks

__all__ = ["Birth", "births", "claimed_twice", "fail_together", "local_store", "publish_self", "ranks_here", "versions"]

_PACKAGES = ("unisono", "torch")
_READING = 5.0  # s
_FAILING = 1.0  # s


class Birth(NamedTuple):
    """What a rank publishes of itself: its `versions`, the kernel it runs on, the address of the store it has made."""

    versions: dict[str, str]
    boot: str
    address: str


def versions() -> dict[str, str]:
    """The versions that must be equal on all ranks; a build (``+cpu``) is none of them."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            found[package] = "of a source tree"
    return found


def claimed_twice(name: int, label: str, pid: int, hostname: str) -> UsageError:
    """The error of a process that is global rank ``name`` of a group, as process ``pid`` on ``hostname`` is.

    ``pid`` 0: it is not known.
    """
    here = socket.gethostname()
    return UsageError(
        f"rank {name} of {label} is claimed twice: by pid {os.getpid()} on {here} and by pid {pid or 'unknown'} on "
        f"{hostname}; give every process its own rank"
    )


def publish_self(store: StoreLike, rank: int, serves: bool = False) -> MemoryStore | None:
    """Publishes what the others compare, before this rank joins: that of an earlier attempt is replaced.

    Returns the store in memory that it makes for all if it ``serves``, should they be on one host.
    """
    local = MemoryStore.create() if serves else None
    store.set(f"birth/{rank}", json.dumps(Birth(versions(), Host.mine().boot, local.address if local else "")))
    return local


def births(store: StoreLike, global_ranks: Sequence[int], label: str) -> list[Birth]:
    """What all ranks have published of themselves; raises `MismatchError`, on every rank, if their versions differ."""
    found = [Birth(*json.loads(store.get(f"birth/{each}"))) for each in range(len(global_ranks))]
    _compare([each.versions for each in found], global_ranks, label)
    return found


def ranks_here(born: Sequence[Birth], rank: int) -> list[int]:
    """The group ranks on the machine of ``rank``: containers of one kernel share its cores."""
    return [each for each, birth in enumerate(born) if birth.boot == born[rank].boot]


def local_store(
    store: StoreLike,
    rank: int,
    size: int,
    nonce: str,
    address: str,
    local: MemoryStore | None,
    left: Callable[[], bool],
) -> MemoryStore | None:
    """The store in memory that the first rank has made for the ranks of one host, ``local`` there; None if it has not.

    All have joined the group ``nonce`` and read the first rank's ``address``. Returns on the first rank, whose process
    may serve ``store``, once all have come here, or after some seconds, one if a rank has ``left``: it may leave at
    once, and that store with it.
    """
    if local is None and address:
        local = MemoryStore.open(address)
    key, start = f"birth/read/{nonce}", time.monotonic()
    read = store.add(key, 1)
    while rank == 0 and read < size and time.monotonic() < start + (_FAILING if left() else _READING):
        time.sleep(0.001)
        read = store.add(key, 0)
    return local


def fail_together(came: JobStore, rank: int, size: int) -> None:
    """Publishes that this rank has failed to make a default group, and why was published before.

    ``came``: the `announcements` of the group. Returns on the first rank, whose process may serve the store, once all
    that have come have failed too, or after a second: they are to read its reason there.
    """
    failed = came.under("failed")
    with suppress(PeerLostError, OSError):  # then no rank reads
        failed.set(str(rank), "")
        others = [key for key in map(str, range(size)) if came.check([key])]
        deadline = time.monotonic() + _FAILING
        while rank == 0 and time.monotonic() < deadline and not all(failed.check([key]) for key in others):
            time.sleep(0.01)


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

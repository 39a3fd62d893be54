"""The birth of a group over several hosts: every rank publishes where it is, and reads where the others are.

The places are published under the number of the first rank's memory, which tells this birth from an earlier one over
the same store.
"""

import json
import os
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch

from unisono.backend.member_registry import MemberRegistry
from unisono.errors import CollectiveTimeout, UsageError
from unisono.transport.host import HostMap, Place
from unisono.units import name_ranks

__all__ = ["gather_places"]

_PAUSE = 0.01  # s


def _versions() -> str:
    try:
        mine = version("unisono")
    except PackageNotFoundError:
        mine = "of a source tree"
    return f"unisono {mine}, torch {torch.__version__.partition('+')[0]}"


def gather_places(
    members: MemberRegistry,
    nonce: str,
    rank: int,
    global_ranks: list[int],
    label: str,
    deadline: float,
    stale: Callable[[], bool],
) -> HostMap | None:
    """The hosts of a group; None if ``nonce`` proves to be of an earlier birth, as ``stale`` finds.

    Raises `CollectiveTimeout` naming the ranks that have not come by ``deadline`` (``time.monotonic``), `UsageError` if
    their versions differ, and what `MemberRegistry.check` raises.
    """
    store, size = members.store.under(f"places/{nonce}"), len(global_ranks)
    if store.add(f"came/{rank}", 1) > 1:
        return None
    mine = Place.mine(os.environ.get("MASTER_ADDR", ""))
    store.set(str(rank), json.dumps([*mine, _versions()]))
    begun = time.monotonic()
    while True:
        missing = [each for each in range(size) if not store.check([str(each)])]
        if not missing:
            break
        if stale():
            return None
        if time.monotonic() > deadline:
            names = [global_ranks[each] for each in missing]
            raise CollectiveTimeout(
                f"{label}: {name_ranks(names)} did not join within {deadline - begun:g} s (world size {size}, on several "
                "hosts). Are all started, with the same address and port?"
            )
        members.check()
        time.sleep(_PAUSE)
    found = [json.loads(store.get(str(each))) for each in range(size)]
    _check_versions([each[-1] for each in found], [Place(*each[:-1]) for each in found], global_ranks)
    return HostMap([Place(*each[:-1]) for each in found], rank)


def _check_versions(versions: list[str], places: list[Place], global_ranks: list[int]) -> None:
    if len(set(versions)) == 1:
        return
    lines = [
        f"{words} on {', '.join(sorted({places[k].hostname for k, each in enumerate(versions) if each == words}))}"
        for words in sorted(set(versions))
    ]
    raise UsageError(f"the hosts of a group run different versions: {'; '.join(lines)}: install one on all")

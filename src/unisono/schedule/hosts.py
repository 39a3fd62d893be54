"""Hosts: which ranks share one. The ranks of each, ascending, hosts by their first rank.

    2           two hosts of equal numbers of ranks, rank by rank
    2x4         the same, of four ranks each
    3+1         hosts of three ranks and of one
    0-2,5/3,4   any: ranks by comma, hosts by stroke

A *run* is a longest sequence of consecutive ranks on one host: hosts of consecutive ranks are one run each. Sums whose
partial sums are those of runs, combined from the first run to the last, keep the ranks' order.
"""

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

from unisono.errors import UsageError
from unisono.units import show_spans

__all__ = ["Hosts", "as_hosts", "runs_of", "show_hosts"]

Hosts = tuple[tuple[int, ...], ...]


def as_hosts(hosts: int | str | Sequence[Sequence[int]], world_size: int) -> Hosts:
    """The ranks of every host, from a number of hosts, one of the forms above, or the ranks themselves.

    Raises UsageError unless every rank is on one host, and every host has a rank.
    """
    if isinstance(hosts, str):
        hosts = _parsed(hosts, world_size)
    if isinstance(hosts, int):
        if hosts < 1 or world_size % hosts:
            raise UsageError(f"{world_size} ranks do not divide among {hosts} hosts")
        hosts = _in_turn([world_size // hosts] * hosts)
    made = tuple(sorted(tuple(sorted(map(int, ranks))) for ranks in hosts))
    if not all(made):
        raise UsageError("a host has no rank: leave it out")
    if sorted(rank for ranks in made for rank in ranks) != list(range(world_size)):
        raise UsageError(f"hosts must hold every rank from 0 to {world_size - 1} once, got {show_hosts(made)}")
    return made


def runs_of(hosts: Hosts) -> Hosts:
    """The runs of all hosts, from rank 0 on; hosts of consecutive ranks as they are."""
    found = []
    for ranks in hosts:
        cuts = [i for i, (a, b) in enumerate(pairwise(ranks), 1) if b != a + 1]
        found += [ranks[a:b] for a, b in pairwise([0, *cuts, len(ranks)])]
    return tuple(sorted(found))


def show_hosts(hosts: Hosts) -> str:
    """The shortest of the forms above."""
    sizes = [len(ranks) for ranks in hosts]
    if hosts == _in_turn(sizes):
        return f"{len(sizes)}x{sizes[0]}" if len(set(sizes)) == 1 else "+".join(map(str, sizes))
    return "/".join(show_spans(ranks, ",", 2) for ranks in hosts)


def _in_turn(sizes: Sequence[int]) -> Hosts:
    """Hosts of so many ranks each, rank by rank."""
    ends = list(accumulate(sizes, initial=0))
    return tuple(tuple(range(a, b)) for a, b in pairwise(ends))


def _parsed(text: str, world_size: int) -> int | Hosts:
    text = text.replace(" ", "")
    if re.fullmatch(r"\d+", text):
        return int(text)
    if equal := re.fullmatch(r"(\d+)x(\d+)", text):
        sizes = [int(equal[2])] * min(int(equal[1]), world_size + 1)
    elif re.fullmatch(r"\d+(\+\d+)+", text):
        sizes = [int(part) for part in text.split("+")]
    elif re.fullmatch(r"[\d,/-]+", text):
        return tuple(tuple(_ranks(part, world_size)) for part in text.split("/"))
    else:
        raise UsageError(f"hosts are {text!r}, expected a number, or a form such as 2x4, 3+1 or 0-2,5/3,4")
    if sum(sizes) != world_size:
        raise UsageError(f"hosts {text} have {sum(sizes)} ranks, not {world_size}")
    return _in_turn(sizes)


def _ranks(text: str, world_size: int) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if span is None:
            raise UsageError(f"ranks of a host are {text!r}, expected a form such as 0-2,5")
        last = int(span[2] or span[1])
        if last >= world_size:
            raise UsageError(f"there is no rank {last} among {world_size} to be on a host")
        found += range(int(span[1]), last + 1)
    return found

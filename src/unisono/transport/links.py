"""The links of a group, measured at its birth by a few exchanges: alpha and beta between all hosts, and inside.

The first ranks of two hosts exchange a few bytes, then many, then several messages at once, both ends posting together;
then they play ping-pong, each receive posted long before its message. Pairs of hosts that share none do it at the same
time. Inside, the first two ranks of each host do the same. Rank 0 collects the numbers and hands all of them to every
rank, so that all ranks hold the same topology, to the bit.

A link of 10 ms and 100 Mbit/s takes about 0.8 s, one of 1 ms and 1 Gbit/s a tenth of it, memory some ms.
"""

import time
from collections.abc import Callable

import torch

from unisono.schedule import Hosts, Link, Memory, Topology, joined
from unisono.transport.base import Transport, Wait

__all__ = ["measure_links"]

_SMALL, _MIDDLE, _LARGE = 4, 256 << 10, 1 << 20  # bytes
_WARM_UP, _ROUNDS, _AT_ONCE = 1, 4, 4
_FEW = 2  # rounds of many bytes
_NUMBERS = 4  # of a link: alpha, beta, announcement, further


def measure_links(transport: Transport, hosts: Hosts, memory: Memory | None = None) -> Topology:
    """The topology of a group, the same on all ranks, each of which calls this.

    Args:
        transport: between the ranks.
        hosts: ranks by host.
        memory: what shared memory costs, where ranks of a host have it; None: they exchange messages.

    Raises what the transport raises.

    """
    rank = transport.rank
    pairs = [*_rounds(hosts), *_inside(hosts)]
    found = {}
    for number, (a, b) in enumerate(pairs):
        if rank in (a, b):
            costs = _measure(transport, b if rank == a else a, rank == a)
            if rank == a:
                found[number] = costs
    agreed = _agreed(transport, pairs, found, _gamma() if rank == 0 else 0.0)
    return _topology(hosts, pairs, agreed, memory)


def _rounds(hosts: Hosts) -> list[tuple[int, int]]:
    """The first ranks of all pairs of hosts, in rounds of a tournament: pairs of one round share no host."""
    n = len(hosts) + len(hosts) % 2
    leaders = [ranks[0] for ranks in hosts] + [-1] * (len(hosts) % 2)
    found = []
    for turn in range(n - 1):
        circle = [0, *(1 + (i + turn) % (n - 1) for i in range(n - 1))]
        pairs = ((leaders[circle[i]], leaders[circle[n - 1 - i]]) for i in range(n // 2))
        found += [(min(pair), max(pair)) for pair in pairs if min(pair) >= 0]
    return found


def _inside(hosts: Hosts) -> list[tuple[int, int]]:
    """The first two ranks of every host that has as many."""
    return [(ranks[0], ranks[1]) for ranks in hosts if len(ranks) > 1]


def _measure(transport: Transport, peer: int, first: bool) -> list[float]:
    """alpha, beta, announcement and further, in seconds (per byte), as this end sees them."""

    def exchange(nbytes: int, messages: int) -> Callable[[], None]:
        out, into = (torch.zeros(messages, nbytes, dtype=torch.uint8) for _ in range(2))

        def once() -> None:
            _done(transport.post([(peer, part) for part in out], [(peer, part) for part in into]))

        return once

    alpha = _usual(_timed(exchange(_SMALL, 1)))
    middle, large = (_usual(_timed(exchange(nbytes, 1), 1, _FEW)) for nbytes in (_MIDDLE, _LARGE))
    several = _usual(_timed(exchange(_SMALL, _AT_ONCE)))
    ahead = _usual(_ping_pong(transport, peer, first)) / 2
    beta = max(large - middle, 0.0) / (_LARGE - _MIDDLE)  # what a shaper lets pass at once is in both
    announcement = min(max(alpha - ahead, 0.0), alpha / 2)
    return [alpha, beta, announcement, max(several - alpha, 0.0) / (_AT_ONCE - 1)]


def _usual(seconds: list[float]) -> float:
    """The lower quartile: cores that are busy with other work make some rounds slower, and none faster."""
    return sorted(seconds)[len(seconds) // 4]


def _timed(once: Callable[[], object], warm_up: int = _WARM_UP, rounds: int = _ROUNDS) -> list[float]:
    """Seconds of each run after the first ones."""
    found = []
    for _ in range(warm_up + rounds):
        began = time.perf_counter()
        once()
        found.append(time.perf_counter() - began)
    return found[warm_up:]


def _ping_pong(transport: Transport, peer: int, first: bool) -> list[float]:
    """Seconds there and back; a receive is posted before the message that asks for its answer is sent."""
    ball, found = torch.zeros(_SMALL, dtype=torch.uint8), []
    into = [torch.zeros(_SMALL, dtype=torch.uint8) for _ in range(_WARM_UP + _ROUNDS)]
    coming = transport.post([], [(peer, into[0])])
    for number in range(_WARM_UP + _ROUNDS):
        began = time.perf_counter()
        if first:
            transport.send(peer, ball)
        _done(coming)
        if number + 1 < len(into):
            coming = transport.post([], [(peer, into[number + 1])])
        if not first:
            transport.send(peer, ball)
        found.append(time.perf_counter() - began)
    return found[_WARM_UP:]


def _done(waits: list[Wait]) -> None:
    for wait in waits:
        wait()


def _gamma() -> float:
    """Seconds per byte of a sum of two tensors."""
    a = torch.ones(1 << 18)
    return min(_timed(lambda: a.add_(a))) / (a.numel() * a.element_size())


def _agreed(
    transport: Transport, pairs: list[tuple[int, int]], found: dict[int, list[float]], gamma: float
) -> torch.Tensor:
    """All numbers on all ranks: those of each pair, then gamma. float64, shape (pairs + 1, 4)."""
    costs = torch.zeros(len(pairs) + 1, _NUMBERS, dtype=torch.float64)
    for number, row in found.items():
        costs[number] = torch.tensor(row, dtype=torch.float64)
    if transport.rank == 0:
        costs[-1, 0] = gamma
        _done(transport.post([], [(a, costs[number]) for number, (a, _) in enumerate(pairs) if a != 0]))
        others = range(1, transport.world_size)
        _done(transport.post([(rank, costs.view(-1)) for rank in others], []))
    else:
        _done(transport.post([(0, costs[number]) for number in found], []))
        transport.receive(0, costs.view(-1))
    return costs


def _topology(hosts: Hosts, pairs: list[tuple[int, int]], costs: torch.Tensor, memory: Memory | None) -> Topology:
    host = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
    free, near = Link("none", 0.0, 0.0), []
    between = [[free] * len(hosts) for _ in hosts]
    for (a, b), (alpha, beta, announcement, further) in zip(pairs, costs.tolist(), strict=False):
        same = host[a] == host[b]
        link = Link("inside" if same else "between hosts", alpha, beta, True, announcement, further)
        if same:
            near.append(link)
        else:
            between[host[a]][host[b]] = between[host[b]][host[a]] = link
    intra = max(near, key=lambda link: link.alpha, default=free)
    return joined(hosts, intra, tuple(map(tuple, between)), float(costs[-1, 0]), memory)

"""Links measured over a transport whose messages take a known time: the numbers, and the same ones on every rank."""

import threading
import time
from collections.abc import Sequence
from functools import partial
from math import isclose

import pytest
import torch

from unisono.schedule import Memory, Topology, as_hosts
from unisono.transport.base import Transport, Wait
from unisono.transport.links import measure_links
from unisono.transport.loopback import Loopback, run_loopback

LATENCY, RATE = 4e-3, 1e8  # s one way, bytes per second


class Slow(Transport):
    """A loopback whose messages, like Gloo's, leave once their receive is announced, one way later."""

    def __init__(self, inner: Loopback, hosts: tuple[tuple[int, ...], ...], board: dict[object, float]) -> None:
        self.rank, self.world_size = inner.rank, inner.world_size
        self.inner, self.board, self.counts = inner, board, {}
        self.host = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}

    def _note(self, kind: str, src: int, dst: int) -> tuple[str, int, int, int]:
        number = self.counts[kind, src, dst] = self.counts.get((kind, src, dst), -1) + 1
        self.board[kind, src, dst, number] = time.perf_counter()
        return kind, src, dst, number

    def post(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Wait]:
        noted = [self._note("recv", peer, self.rank) for peer, _ in receives]
        for peer, _ in sends:
            self._note("send", self.rank, peer)
        waits = self.inner.post(sends, receives)

        def wait(one: Wait, key: tuple[str, int, int, int], nbytes: int) -> None:
            one()
            _, src, dst, number = key
            if self.host[src] == self.host[dst]:
                return
            left = max(self.board["send", src, dst, number], self.board[key] + LATENCY)
            due = left + LATENCY + nbytes / RATE
            time.sleep(max(due - time.perf_counter(), 0.0))

        coming = zip(waits[len(sends) :], noted, receives, strict=True)
        slow = [partial(wait, one, key, into.numel() * into.element_size()) for one, key, (_, into) in coming]
        return [*waits[: len(sends)], *slow]


@pytest.mark.parametrize("cut", ["2+1", "0,2/1"])
def test_alpha_beta_and_the_announcement_are_found_and_agreed(cut: str) -> None:
    hosts, board = as_hosts(cut, 3), {}
    memory = Memory(1e-6, 1e-6, 1e-10)

    def main(inner: Loopback) -> Topology:
        return measure_links(Slow(inner, hosts, board), hosts, memory)

    found = run_loopback(3, main)
    assert found[0] == found[1] == found[2]
    topology = found[0]
    assert (topology.ranks_of_hosts, topology.memory) == (hosts, memory)
    link = topology.between[0][1]
    assert link == topology.between[1][0]
    assert isclose(link.alpha, 2 * LATENCY, rel_tol=0.5)
    assert isclose(link.announcement, LATENCY, rel_tol=0.5)
    assert isclose(link.beta, 1 / RATE, rel_tol=0.5)
    assert topology.intra.alpha < LATENCY / 2
    assert topology.gamma > 0


def test_pairs_of_hosts_measure_once_each_and_a_host_alone_its_inside() -> None:
    seen, lock = [], threading.Lock()

    class Counting(Slow):
        def post(self, sends, receives):  # type: ignore[no-untyped-def]
            with lock:
                seen.extend((self.rank, peer) for peer, tensor in sends if tensor.numel() > 100_000)
            return super().post(sends, receives)

    hosts = as_hosts("5x1", 5)
    run_loopback(5, lambda inner: measure_links(Counting(inner, ((0, 1, 2, 3, 4),), {}), hosts))
    assert {(min(pair), max(pair)) for pair in seen} == {(a, b) for a in range(5) for b in range(a + 1, 5)}
    assert len(set(seen)) == 20
    alone = run_loopback(1, lambda inner: measure_links(inner, ((0,),)))[0]
    assert (alone.hosts, alone.intra.alpha) == (1, 0.0)

"""Links measured over a transport whose messages take a known time: the numbers, and the same ones on every rank."""

import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from unisono.schedule import Hosts, Memory, as_hosts
from unisono.transport.base import Transport, Wait
from unisono.transport.links import measure_links
from unisono.transport.loopback import Loopback, run_loopback

LATENCY, RATE = 4e-3, 1e8  # s one way, bytes per second
OWN = threading.local()  # the transport of a rank, which is a thread


class Slow(Transport):
    """A loopback with a clock: messages, like Gloo's, leave once their receive is announced, one way later."""

    def __init__(self, inner: Loopback, hosts: Hosts, posted: dict[tuple[str, int, int, int], float]) -> None:
        self.rank, self.world_size = inner.rank, inner.world_size
        self.inner, self.posted, self.counts = inner, posted, Counter[tuple[str, int, int]]()
        self.host = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
        self.now = 0.0
        OWN.transport = self

    def _note(self, kind: str, src: int, dst: int) -> tuple[int, int, int]:
        number = self.counts[kind, src, dst]
        self.counts[kind, src, dst] += 1
        self.posted[kind, src, dst, number] = self.now
        return src, dst, number

    def post(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Wait]:
        noted = [self._note("recv", peer, self.rank) for peer, _ in receives]
        for peer, _ in sends:
            self._note("send", self.rank, peer)
        waits = self.inner.post(sends, receives)

        def wait(one: Wait, key: tuple[int, int, int], nbytes: int) -> None:
            one()
            left = max(self.posted["send", *key], self.posted["recv", *key] + LATENCY)
            if self.host[key[0]] != self.host[key[1]]:
                self.now = max(self.now, left + LATENCY + nbytes / RATE)

        coming = zip(waits[len(sends) :], noted, receives, strict=True)
        slow = [partial(wait, one, key, into.numel() * into.element_size()) for one, key, (_, into) in coming]
        return [*waits[: len(sends)], *slow]


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=lambda: getattr(OWN, "transport", SimpleNamespace(now=0.0)).now)
    monkeypatch.setattr("unisono.transport.links.time", clock)


@pytest.mark.parametrize("cut", ["2+1", "0,2/1"])
def test_alpha_beta_and_the_announcement_are_found_and_agreed(cut: str) -> None:
    hosts, posted = as_hosts(cut, 3), {}
    memory = Memory(1e-6, 1e-6, 1e-10)
    found = run_loopback(3, lambda inner: measure_links(Slow(inner, hosts, posted), hosts, memory))
    assert found[0] == found[1] == found[2]
    topology = found[0]
    assert (topology.ranks_of_hosts, topology.memory) == (hosts, memory)
    link = topology.between[0][1]
    assert link == topology.between[1][0]
    assert link.alpha == pytest.approx(2 * LATENCY, rel=1e-3)
    assert link.announcement == pytest.approx(LATENCY, rel=1e-3)
    assert link.beta == pytest.approx(1 / RATE, rel=1e-3)
    assert topology.intra.alpha == 0


def test_pairs_of_hosts_measure_once_each_and_a_host_alone_its_inside() -> None:
    seen, lock = [], threading.Lock()

    class Counting(Slow):
        def post(self, sends, receives):  # type: ignore[no-untyped-def]
            with lock:
                seen.extend((self.rank, peer) for peer, tensor in sends if tensor.numel() > 100_000)
            return super().post(sends, receives)

    hosts = as_hosts("5x1", 5)
    posted: dict[tuple[str, int, int, int], float] = {}
    run_loopback(5, lambda inner: measure_links(Counting(inner, hosts, posted), hosts))
    assert {(min(pair), max(pair)) for pair in seen} == {(a, b) for a in range(5) for b in range(a + 1, 5)}
    assert len(set(seen)) == 20
    alone = run_loopback(1, lambda inner: measure_links(inner, ((0,),)))[0]
    assert (alone.hosts, alone.intra.alpha) == (1, 0.0)

"""Topologies of any hosts: places and links of ranks, and the way into a file and back."""

from pathlib import Path

import numpy as np
import pytest

from unisono.algorithms import build
from unisono.errors import UsageError
from unisono.schedule import LINKS, Link, Memory, Topology, as_hosts, joined, preset
from unisono.schedule.topology_file import load_topology, save_topology, topology_path
from unisono.simulation import simulate

NEAR = Link("near", 1e-6, 1e-10)
FAR = Link("far", 1e-3, 1e-8, announcement=4e-4)
SLOW = Link("slow", 5e-3, 1e-7)


def uneven() -> Topology:
    between = ((NEAR, FAR, SLOW), (FAR, NEAR, FAR), (SLOW, FAR, NEAR))
    return joined(as_hosts("0,4/1-3/5", 6), NEAR, between, 1e-10, Memory(1e-6, 2e-6, 1e-10, 2))


def test_ranks_are_where_the_hosts_say() -> None:
    topology = uneven()
    assert (topology.world_size, topology.hosts, topology.ranks_per_host) == (6, 3, 3)
    assert topology.host(np.arange(6)).tolist() == [0, 1, 1, 1, 0, 2]
    assert topology.outside([0, 0, 1], [4, 1, 3]).tolist() == [False, True, False]
    assert [topology.link(0, other).name for other in (4, 1, 5)] == ["near", "far", "slow"]
    assert topology.alpha([0, 0, 0], [4, 1, 5]).tolist() == [1e-6, 1e-3, 5e-3]
    assert topology.beta([1, 2], [5, 3]).tolist() == [1e-8, 1e-10]
    out, into = topology.ports([0, 4, 1], [1, 1, 2])
    assert out[0] == out[1] != out[2]
    assert into[0] == into[1] != into[2]
    assert topology.describe().startswith("measured: 3 hosts of 0,4/1-3/5 ranks over near (1 µs, 10 GB/s")


def test_links_between_hosts_decide_the_time() -> None:
    topology = uneven()
    assert simulate(build("star", "broadcast", 6), topology, 0).time == pytest.approx(5e-3)
    assert simulate(build("ring", "all_gather", 6), topology, 0).time >= 5e-3


def test_a_file_holds_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="a group that spans hosts measures one, `unisono topo` keeps it"):
        load_topology()
    assert save_topology(uneven()) == topology_path()
    found = load_topology()
    assert found.ranks_of_hosts == uneven().ranks_of_hosts
    assert [found.link(0, r) for r in range(1, 6)] == [uneven().link(0, r) for r in range(1, 6)]
    assert (found.gamma, found.memory, found.intra) == (1e-10, Memory(1e-6, 2e-6, 1e-10, 2), NEAR)
    alone = preset("shared_memory", 3)
    assert load_topology(save_topology(alone, tmp_path / "alone.json")).link(0, 2) == LINKS["shared_memory"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[1", "is not JSON: "),
        ("{}", "not a topology in JSON .'intra'.: expected topology, hosts, intra, between"),
        ('{"topology": "t", "hosts": [[0, 2]], "intra": {"name": "a", "alpha": 0, "beta": 0}}', "once, got 0,2"),
        ('{"topology": "t", "hosts": [[0], [1]], "intra": {"name": "a", "alpha": 0, "beta": 0}}', "no link between"),
        ('{"topology": "t", "hosts": [[0]], "intra": {"name": "a", "alpha": -1, "beta": 0}}', "negative costs"),
        ('{"topology": "t", "hosts": [[0]], "intra": {"name": "a"}}', "alpha"),
    ],
)
def test_what_is_no_topology_is_refused_by_the_name_of_the_file(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "links.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=says) as caught:
        load_topology(file)
    assert "links.json" in str(caught.value)


def test_hosts_and_links_must_agree() -> None:
    hosts = as_hosts("2+1", 3)
    with pytest.raises(UsageError, match="needs 2 x 2 links"):
        Topology("t", 2, 2, NEAR, FAR, cut=hosts, between=((NEAR,),))
    with pytest.raises(UsageError, match=r"has 3 hosts, but its cut is 2\+1"):
        Topology("t", 3, 2, NEAR, FAR, cut=hosts)
    with pytest.raises(UsageError, match="the announcement, 2, is no part of 1"):
        Link("l", 1, 0, announcement=2)
    with pytest.raises(UsageError, match="shared memory needs a core"):
        Memory(0, 0, 0, 0)

import numpy as np
import pytest

from unisono.errors import UsageError
from unisono.schedule import LINKS, PRESETS, Link, Topology, cluster, preset


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_ranks_and_the_link_they_are_named_for(name: str) -> None:
    topology = preset(name, 12)
    assert topology.world_size == 12
    assert topology.name == name
    assert topology.gamma > 0
    if name != "cluster":
        assert topology.link(0, 11) == LINKS[name]
    assert topology.describe().startswith(f"{name}: ")


def test_a_cluster_has_two_links() -> None:
    topology = cluster(hosts=2, ranks_per_host=4)
    assert topology.link(0, 3).name == "nvlink"
    assert topology.link(3, 4).name == "infiniband"
    near, far = LINKS["nvlink"], LINKS["infiniband"]
    assert topology.alpha([0, 3, 4], [3, 4, 7]).tolist() == [near.alpha, far.alpha, near.alpha]
    assert topology.beta([0, 3, 4], [3, 4, 7]).tolist() == [near.beta, far.beta, near.beta]
    assert topology.host([0, 3, 4, 7]).tolist() == [0, 0, 1, 1]
    assert topology.outside([0, 3], [1, 4]).tolist() == [False, True]
    assert topology.describe() == (
        "cluster: 2 hosts of 4 ranks over nvlink (0.6 µs, 400 GB/s, switched), "
        "joined by 4 x infiniband (2.7 µs, 50 GB/s, switched)"
    )


def test_clusters_by_name_have_the_largest_hosts_that_fit() -> None:
    shapes = {n: (preset("cluster", n).hosts, preset("cluster", n).ranks_per_host) for n in (1, 7, 8, 12, 22, 24576)}
    assert shapes == {1: (1, 1), 7: (1, 7), 8: (1, 8), 12: (2, 6), 22: (11, 2), 24576: (3072, 8)}


def test_ports_inside_are_the_ranks_and_outside_the_nics() -> None:
    topology = cluster(hosts=2, ranks_per_host=4, nics=2)
    out, into = topology.ports([0, 0, 1, 2, 7], [1, 4, 5, 6, 0])
    # ranks 0..7 have ports 0..7; host 0 has NICs 8, 9 and host 1 has 10, 11, each shared by two ranks
    assert out.tolist() == [0, 8, 8, 9, 11]
    assert into.tolist() == [1, 10, 10, 11, 8]


def test_point_to_point_wires_are_one_per_ordered_pair() -> None:
    topology = Topology("mesh", 1, 3, Link("wire", 1e-6, 1e-9, switched=False))
    pairs = [(s, d) for s in range(3) for d in range(3) if s != d]
    out, into = topology.ports(*np.array(pairs).T)
    assert out.tolist() == into.tolist()
    assert len(set(out.tolist())) == len(pairs)
    assert out.min() >= topology.world_size
    assert topology.describe() == "mesh: 3 ranks over wire (1 µs, 1 GB/s, point-to-point)"
    free = Topology("free", 1, 2, Link("free", 0.0, 0.0))
    assert free.describe() == "free: 2 ranks over free (0 µs, no limit, switched)"


def test_a_switch_is_reached_from_outside_and_never_busy() -> None:
    topology = cluster(hosts=2, ranks_per_host=2)
    out, into = topology.ports([0, 4], [4, 3])
    assert (out.tolist(), into.tolist()) == ([4, -1], [-1, 7])
    assert topology.alpha([0, 4], [4, 3]).tolist() == [LINKS["infiniband"].alpha] * 2
    inside = preset("nvlink", 4)
    assert inside.alpha([0], [4]).tolist() == [LINKS["nvlink"].alpha]
    assert inside.host([3, 4]).tolist() == [0, -1]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: preset("token_ring", 4), "unknown topology 'token_ring': expected one of shared_memory, pcie"),
        (lambda: preset("pcie", 0), "needs at least 1 rank, got 0"),
        (lambda: cluster(0, 8), "got 0 hosts, 8 ranks per host"),
        (lambda: cluster(2, 8, nics=0), "0 NICs"),
        (lambda: Link("back", -1e-6, 0.0), "link back cannot have negative costs, got alpha=-1e-06, beta=0.0"),
        (lambda: Topology("t", 1, 4, LINKS["pcie"], gamma=-1.0), "negative costs, got gamma=-1.0"),
        (lambda: Topology("two", 2, 4, LINKS["pcie"]), "has 2 hosts and no link between them: give `inter`"),
    ],
)
def test_what_cannot_be_is_refused(make, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=says):
        make()

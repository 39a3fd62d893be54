"""Leaders: one rank of every host speaks for it, so that hosts exchange as few messages as can be.

all_reduce: every host sums to its leader, the leaders exchange their sums, and each hands the total to its host. For
hosts of ranks 0-1 and 2-3:

    step 0: 1>0 c0 +, 3>2 c0 +
    step 1: 0>2 c0 +, 2>0 c0 +
    step 2: 0>1 c0 =, 2>3 c0 =

One message between hosts and its latency, but the bytes of the host by one rank: for small messages, over slow links.
Options: hosts (schedule/hosts.py; any cut, by default the most nearly square grid) and inter, the algorithm between
leaders: with `one_shot`, `two_phase` and `star` sums keep the ranks' order, by runs (algorithms/cut.py), with
others `unisono verify --order` says; by default one_shot, for more than 256 hosts recursive_doubling. A leader is the
lowest rank of its host, and the root of its own.
Source: Sistare, vandeVaart and Loh, "Optimization of MPI collectives on clusters of large-scale SMPs", 1999.
"""

import numpy as np

from unisono.algorithms.blocks import build_level
from unisono.algorithms.cut import Cut, HostsOption, Ints, cut_of, once
from unisono.algorithms.registry import register_algorithm
from unisono.schedule import Collective, Schedule, Step
from unisono.schedule.model import chain_steps
from unisono.schedule.transform import place

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"]


MANY = 256
"""Groups above which not all leaders exchange with all by default."""


def _whole(cut: Cut, leaders: Ints, chunks: int, inward: bool) -> Step:
    """Every other rank's chunks to its leader, summed; or the leader's to them, copied over."""
    others = cut.followers(leaders)
    ends = (others, leaders[cut.group[others]])
    return Step.make(*(ends if inward else ends[::-1]), 0, chunks, inward)


@register_algorithm("leaders", "all_reduce", steps="2*(a>1) + (b>1)", nbytes_per_rank="a+b-2")
def all_reduce(world_size: int, chunks: int = 1, hosts: HostsOption = None, inter: str = "") -> Schedule:
    """Sums to the leaders, an exchange between them, and back."""
    cut = cut_of(world_size, hosts, True)
    name = inter or ("one_shot" if len(cut.groups) <= MANY else "recursive_doubling")
    between = build_level(name, "leaders", "all_reduce", len(cut.groups), 0, chunks)
    leaders, total = cut.leaders(), between.collective.num_chunks
    across = place(between.steps, leaders[None, :], np.arange(total)[None, :])
    inward, outward = (once(_whole(cut, leaders, total, summed)) for summed in (True, False))
    steps = chain_steps(chain_steps(inward, across), outward)
    return Schedule("leaders", Collective.of("all_reduce", world_size, total), steps)


@register_algorithm("leaders", "broadcast", steps="(a>1) + (b>1)", nbytes_per_rank="a+b-2")
def broadcast(
    world_size: int, root: int = 0, chunks: int = 1, hosts: HostsOption = None, inter: str = "star"
) -> Schedule:
    """The root to the other hosts' leaders, then each leader to its host."""
    return _broadcast(cut_of(world_size, hosts, False), root, chunks, inter)


def _broadcast(cut: Cut, root: int, chunks: int, inter: str) -> Schedule:
    between = build_level(inter, "leaders", "broadcast", len(cut.groups), int(cut.group[root]), chunks)
    leaders, total = cut.leaders(root), between.collective.num_chunks
    across = place(between.steps, leaders[None, :], np.arange(total)[None, :])
    steps = chain_steps(across, once(_whole(cut, leaders, total, False)))
    return Schedule("leaders", Collective.of("broadcast", cut.world_size, total, root), steps)


@register_algorithm("leaders", "reduce", steps="(a>1) + (b>1)", nbytes_per_rank="1")
def reduce(world_size: int, root: int = 0, chunks: int = 1, hosts: HostsOption = None, inter: str = "star") -> Schedule:
    """The broadcast backwards: sums inside first, then between hosts."""
    return _broadcast(cut_of(world_size, hosts, True), root, chunks, inter).reversed()


def _exchange(cut: Cut, leaders: Ints, chunks: int, reduce: bool) -> Step:
    """Between leaders: the blocks of the sender's ranks, or where sums go out those of the receiver's."""
    groups = np.arange(len(leaders))
    span, peer = (ends.ravel() for ends in np.meshgrid(np.arange(len(cut.spans)), groups, indexing="ij"))
    far = cut.spans[span, 0] != peer
    (mine, first, count), peer = cut.spans[span[far]].T, peer[far]
    ends = (leaders[peer], leaders[mine]) if reduce else (leaders[mine], leaders[peer])
    return Step.make(*ends, first * chunks, count * chunks, reduce)


@register_algorithm(
    "leaders",
    "all_gather",
    steps="2*(a>1) + (b>1)",
    nbytes_per_rank="(a*(b-1) + (a-1)*(n-1))/n",
)
def all_gather(world_size: int, chunks: int = 1, hosts: HostsOption = None) -> Schedule:
    """Blocks to the leaders, an exchange between them, and all to every rank."""
    cut = cut_of(world_size, hosts, False)
    leaders = cut.leaders()
    others = cut.followers(leaders)
    lead = leaders[cut.group[others]]
    up = Step.make(others, lead, others * chunks, chunks)
    below = Step.make(lead, others, 0, others * chunks)
    above = Step.make(lead, others, (others + 1) * chunks, (world_size - 1 - others) * chunks)
    down = _some(Step.together(below, above))
    steps = once(up, _exchange(cut, leaders, chunks, False), down)
    return Schedule("leaders", Collective.of("all_gather", world_size, chunks), steps)


def _one_block_each(cut: Cut, leaders: Ints, chunks: int) -> Step:
    """From the leaders: to each of the other ranks its own block."""
    others = cut.followers(leaders)
    return Step.make(leaders[cut.group[others]], others, others * chunks, chunks)


def _some(step: Step) -> Step:
    """Without the transfers of no chunks."""
    kept = step.count > 0
    return Step.make(step.src[kept], step.dst[kept], step.chunk[kept], step.count[kept], step.reduce[kept])


@register_algorithm(
    "leaders",
    "reduce_scatter",
    steps="2*(a>1) + (b>1)",
    nbytes_per_rank="<= 1",
)
def reduce_scatter(world_size: int, chunks: int = 1, hosts: HostsOption = None) -> Schedule:
    """Sums to the leaders, an exchange between them of each host's blocks, and one block to each rank."""
    cut = cut_of(world_size, hosts, True)
    leaders = cut.leaders()
    down = _one_block_each(cut, leaders, chunks)
    steps = once(_whole(cut, leaders, world_size * chunks, True), _exchange(cut, leaders, chunks, True), down)
    return Schedule("leaders", Collective.of("reduce_scatter", world_size, chunks), steps)


@register_algorithm("leaders", "scatter", steps="(a>1) + (b>1)", nbytes_per_rank="(n-1)/n")
def scatter(world_size: int, root: int = 0, chunks: int = 1, hosts: HostsOption = None) -> Schedule:
    """Each host's blocks to its leader, then one block to each rank."""
    cut = cut_of(world_size, hosts, False)
    leaders = cut.leaders(root)
    spans = cut.spans[cut.spans[:, 0] != cut.group[root]].T
    out = Step.make(root, leaders[spans[0]], spans[1] * chunks, spans[2] * chunks)
    down = _one_block_each(cut, leaders, chunks)
    return Schedule("leaders", Collective.of("scatter", world_size, chunks, root), once(out, down))


@register_algorithm("leaders", "gather", steps="(a>1) + (b>1)", nbytes_per_rank="<= 1/b")
def gather(world_size: int, root: int = 0, chunks: int = 1, hosts: HostsOption = None) -> Schedule:
    """The scatter backwards: blocks collect inside first, then between hosts."""
    return scatter(world_size, root, chunks, hosts).reversed()


@register_algorithm(
    "leaders",
    "all_to_all",
    steps="(a>1) + (b>1) + (a>1)*(b>1)",
    nbytes_per_rank="(a-1 + a*a*(b-1) + (a-1)*(n-a))/n",
)
def all_to_all(world_size: int, chunks: int = 1, hosts: HostsOption = None) -> Schedule:
    """Blocks for other hosts to the leader, one message per pair of hosts, then to whom they are for."""
    cut = cut_of(world_size, hosts, False)
    leaders = cut.leaders()
    dst, src = np.divmod(np.arange(world_size**2), world_size)
    block = (src * world_size + dst) * chunks
    far = cut.group[src] != cut.group[dst]
    first, last = np.where(far, leaders[cut.group[src]], dst), np.where(far, leaders[cut.group[dst]], dst)
    up, across, down = first != src, far, last != dst
    steps = once(
        Step.make(src[up], first[up], block[up], chunks),
        Step.make(first[across], last[across], block[across], chunks),
        Step.make(last[down], dst[down], block[down], chunks),
    )
    return Schedule("leaders", Collective.of("all_to_all", world_size, chunks), steps)

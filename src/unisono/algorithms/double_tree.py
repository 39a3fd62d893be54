"""Double binary tree: two complementary trees, half of the bytes through each.

In a binary tree numbered in order, 1 .. m, the odd nodes are leaves and the even ones inner. Mirror the numbers (m
even) or shift them by one (m odd), and the second tree makes leaves of the first one's inner nodes: every rank is inner
in at most one tree, so it sends and receives in full in both directions, where one tree leaves half of all ranks idle.

A rank meets up to two tree edges as sender and two as receiver. Colouring the edges with two colours, so that no rank
sends or receives twice in one colour, gives each edge its even or odd steps; a piece moves on at the next step of the
right parity. Depth is about log2 n, and each further piece costs two steps: at most 2 ceil(log2 n) + 2k steps.
Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009.
"""

import numpy as np
from numpy.typing import NDArray

from unisono.algorithms.registry import register_algorithm
from unisono.schedule import Collective, LazySteps, Schedule, Step

__all__ = ["all_reduce", "broadcast", "parents", "reduce"]

Edge = tuple[int, int, int]  # tree, parent, child


def parents(nodes: int) -> list[list[int]]:
    """For each of the two trees, the parent of each node 0 .. nodes-1 (-1 for the tree's root)."""
    numbers = range(1, nodes + 1)
    mirrored = [nodes - v for v in range(nodes)]
    shifted = [(v + 1) % nodes + 1 for v in range(nodes)]
    trees = []
    for number in (list(numbers), mirrored if nodes % 2 == 0 else shifted):
        node = {q: v for v, q in enumerate(number)}
        trees.append([node.get(_above(q, nodes), -1) for q in number])
    return trees


def _above(number: int, nodes: int) -> int:
    """The parent's number in the in-order tree of numbers 1 .. nodes, 0 above the root."""
    low = number & -number
    rest = number ^ low
    return rest | low << 1 if rest | low << 1 <= nodes else rest


def _colours(edges: list[Edge]) -> list[int]:
    """0 or 1 for each edge, different for edges with the same sender or the same receiver."""
    meeting: dict[tuple[str, int], list[int]] = {}
    for e, (_, parent, child) in enumerate(edges):
        meeting.setdefault(("sends", parent), []).append(e)
        meeting.setdefault(("receives", child), []).append(e)
    colour = [-1] * len(edges)
    for start in range(len(edges)):
        todo = [(start, 0)] if colour[start] < 0 else []
        while todo:
            e, wanted = todo.pop()
            if colour[e] < 0:
                colour[e] = wanted
                _, parent, child = edges[e]
                near = meeting["sends", parent] + meeting["receives", child]
                todo += [(other, 1 - wanted) for other in near if other != e]
    return colour


def _timetable(edges: list[Edge]) -> NDArray[np.int64]:
    """The step in which each edge carries its tree's first piece; it carries one more every two steps."""
    colour = _colours(edges)
    below: dict[tuple[int, int], list[int]] = {}
    for e, (tree, parent, _) in enumerate(edges):
        below.setdefault((tree, parent), []).append(e)
    children = {(tree, child) for tree, _, child in edges}
    todo = [(e, 0) for key, es in below.items() if key not in children for e in es]
    when = np.zeros(len(edges), dtype=np.int64)
    while todo:
        e, earliest = todo.pop()
        when[e] = earliest + (earliest + colour[e]) % 2
        todo += [(other, int(when[e]) + 1) for other in below.get((edges[e][0], edges[e][2]), [])]
    return when


def _down(edges: list[Edge], chunks: int) -> LazySteps:
    """Steps that carry pieces 0 .. chunks-1 down tree 0 and the other half of the pieces down tree 1."""
    when = _timetable(edges)
    tree, parent, child = np.array(edges, dtype=np.int64).reshape(-1, 3).T

    busy = np.unique(np.unique(when)[:, None] + 2 * np.arange(chunks))

    def make(i: int) -> Step:
        piece, odd = np.divmod(busy[i] - when, 2)
        now = (odd == 0) & (piece >= 0) & (piece < chunks)
        return Step.make(parent[now], child[now], (tree * chunks + piece)[now])

    return LazySteps(len(busy), make)


@register_algorithm("double_tree", "broadcast", steps="<= 2*L + 2*k", nbytes_per_rank="1")
def broadcast(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """The root feeds two trees over the others, half of the bytes each."""
    edges = [
        (tree, root if p < 0 else (root + 1 + p) % world_size, (root + 1 + v) % world_size)
        for tree, above in enumerate(parents(world_size - 1))
        for v, p in enumerate(above)
    ]
    collective = Collective.of("broadcast", world_size, 2 * chunks, root)
    return Schedule("double_tree", collective, _down(edges, chunks))


@register_algorithm("double_tree", "reduce", steps="<= 2*L + 2*k", nbytes_per_rank="1")
def reduce(world_size: int, root: int = 0, chunks: int = 1) -> Schedule:
    """The broadcast backwards: half of the bytes is summed up each tree."""
    return broadcast(world_size, root, chunks).reversed()


@register_algorithm("double_tree", "all_reduce", steps="<= 4*L + 4*k", nbytes_per_rank="<= 2")
def all_reduce(world_size: int, chunks: int = 1) -> Schedule:
    """Sums run up both trees to their roots, results run back down."""
    edges = [(tree, p, v) for tree, above in enumerate(parents(world_size)) for v, p in enumerate(above) if p >= 0]
    down = _down(edges, chunks)
    last = len(down) - 1
    steps = LazySteps(
        2 * len(down), lambda t: down[last - t].reversed(reduce=True) if t <= last else down[t - last - 1]
    )
    return Schedule("double_tree", Collective.of("all_reduce", world_size, 2 * chunks), steps)

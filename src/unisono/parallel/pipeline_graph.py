"""The graph of a stage, cut in two for a backward in two halves: the way to the input, and what leads off it."""

from collections import Counter
from collections.abc import Iterator

from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

__all__ = ["Edges", "sort_out", "ways_off"]

Edges = dict[Node, list[GradientEdge]]
"""Nodes on the way, in an order that is the same wherever the same graph was built, with edges that lead off it."""


def ways_off(start: Node, goal: Node) -> Edges | None:
    """The nodes on a way from start to goal that have edges off it, with those edges; None if there is no way."""
    before: dict[Node, list[Node]] = {start: []}
    queue = [start]
    while queue:
        node = queue.pop()
        for following, _ in node.next_functions:
            if following is not None:
                if following not in before:
                    before[following] = []
                    queue.append(following)
                before[following].append(node)
    if goal not in before:
        return None
    on_way, queue = {goal}, [goal]
    while queue:
        for node in before[queue.pop()]:
            if node not in on_way:
                on_way.add(node)
                queue.append(node)
    found: Edges = {}
    for node in before:
        if node in on_way and node is not goal:
            off = [(n, i) for n, i in node.next_functions if n is not None and n not in on_way]
            found[node] = [edge for n, i in off for edge in _past_python(n, i)]
    return {node: edges for node, edges in found.items() if edges}


def _in_python(node: object) -> bool:
    return isinstance(node, BackwardCFunction)


def _past_python(node: Node, place: int) -> Iterator[GradientEdge]:
    """The edge to ``node``, or, past nodes written in Python, where torch 2.11 cannot begin, those to the next ones."""
    if _in_python(node):
        for following, i in node.next_functions:
            if following is not None:
                yield from _past_python(following, i)
    else:
        yield GradientEdge(node, place)


def sort_out(edges_off: Edges) -> tuple[list[GradientEdge], Edges]:
    """The edges whose gradients the first half takes along, and those that are left for the second.

    Taken along is what a node in Python computes anyway, and every edge at which ways off meet: from several nodes, or
    one below the other. There the second half, which begins at each node by itself, would count a gradient twice; only
    the whole sum is right. What lies above or below such an edge is taken along too, down to the weights.
    """
    uses = Counter(edge for edges in edges_off.values() for edge in edges)
    below = {edge: _below(edge.node) for edge in uses}
    in_python = {e for node, edges in edges_off.items() if _in_python(node) for e in edges}
    met = {edge for edge in uses if uses[edge] > 1 or any(edge.node in others for others in below.values())}
    early = {edge: None for edge in uses if edge in in_python or edge in met}
    while entangled := [edge for edge in below if below[edge].keys() & {taken.node for taken in early}]:
        for edge in entangled:
            early.pop(edge, None)
            weights = [(n, places) for n, places in below.pop(edge).items() if not n.next_functions]
            early |= {GradientEdge(n, i): None for n, places in weights for i in places}
    rest = {node: [e for e in edges if e in below and e not in early] for node, edges in edges_off.items()}
    return list(early), {node: edges for node, edges in rest.items() if edges}


def _below(node: Node) -> dict[Node, list[int]]:
    """The nodes that ``node`` leads to, each with the places at which it is entered."""
    found: dict[Node, list[int]] = {}
    queue = [node]
    while queue:
        for following, place in queue.pop().next_functions:
            if following is not None:
                if following not in found:
                    found[following] = []
                    queue.append(following)
                if place not in found[following]:
                    found[following].append(place)
    return found

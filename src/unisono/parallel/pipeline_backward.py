"""Backward of a stage in two halves: the gradient of its input, which the rank before waits for, then the weights'.

In the graph of a stage some nodes lie on the way from its output to its input, and some of those have edges that lead
off the way, to weights: `x @ w + b` has one to x, on the way, and two off it. The first half runs the way alone and
notes the gradient that arrives at each such node. The second half starts at those nodes with what was noted, and runs
what lies off the way. So nothing is done twice, except in autograd functions written in Python, which compute all of
their gradients at once. The idea is that of the zero bubble schedules (Qi et al. 2023).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["WeightGradients", "input_gradient"]

_Noted = dict[Node, tuple[Tensor | None, ...]]


@dataclass(frozen=True)
class WeightGradients:
    """The second half, still to be done. It keeps alive what it needs of the graph."""

    roots: list[GradientEdge]
    gradients: list[Tensor]
    ways_off: dict[Node, list[GradientEdge]]
    noted: _Noted

    def accumulate(self) -> None:
        """Add the gradients of all weights to their `.grad`, hooks included. To be called once."""
        roots, gradients = list(self.roots), list(self.gradients)
        for node, edges in self.ways_off.items():
            arrived = [(GradientEdge(node, i), g) for i, g in enumerate(self.noted.get(node, ())) if g is not None]
            if not arrived:
                continue
            starts, given = zip(*arrived, strict=True)
            found = torch.autograd.grad(starts, edges, given, retain_graph=True, allow_unused=True)
            for edge, gradient in zip(edges, found, strict=True):
                if gradient is not None:
                    roots.append(edge)
                    gradients.append(gradient)
        if roots:
            torch.autograd.backward(roots, gradients)


def input_gradient(
    output: Tensor, gradient: Tensor | None, source: Tensor | None
) -> tuple[Tensor | None, WeightGradients]:
    """The gradient of `source`, a leaf, and what is left to do. `gradient` is that of output (None: of a scalar, 1).

    Without a source that takes gradients, or if the output does not depend on it, there is no first half: everything is
    left to do, and None is returned.
    """
    if not output.requires_grad:
        return None, WeightGradients([], [], {}, {})
    end = get_gradient_edge(output)
    given = torch.ones_like(output) if gradient is None else gradient
    if source is None or not source.requires_grad:
        return None, WeightGradients([end], [given], {}, {})
    goal = get_gradient_edge(source)
    ways_off = _ways_off(end.node, goal.node)
    if ways_off is None:
        return None, WeightGradients([end], [given], {}, {})
    uses = Counter(edge for edges in ways_off.values() for edge in edges)
    shared = [edge for edge, count in uses.items() if count > 1]  # seen from several nodes: only the whole sum is right
    ways_off = {n: rest for n, edges in ways_off.items() if (rest := [e for e in edges if uses[e] == 1])}
    noted: _Noted = {}
    handles = [node.register_prehook(_note(noted, node)) for node in ways_off]
    try:
        found = torch.autograd.grad([end], [goal, *shared], [given], retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    sums = [(edge, value) for edge, value in zip(shared, found[1:], strict=True) if value is not None]
    return found[0], WeightGradients([e for e, _ in sums], [v for _, v in sums], ways_off, noted)


def _note(noted: _Noted, node: Node) -> Callable[[tuple[Tensor, ...]], None]:
    def hook(gradients: tuple[Any, ...]) -> None:
        noted[node] = gradients

    return hook


def _ways_off(start: Node, goal: Node) -> dict[Node, list[GradientEdge]] | None:
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
    found: dict[Node, list[GradientEdge]] = {}
    for node in on_way - {goal}:
        edges = [GradientEdge(n, i) for n, i in node.next_functions if n is not None and n not in on_way]
        if edges:
            found[node] = edges
    return found

"""Backward of any stage in two halves, B then W; torch has it for its own pipeline stages, as private functions.

The first half is the gradient of the stage's input, which the rank before waits for, the second that of the weights.

In the graph of a stage some nodes lie on the way from its output to its input, and some of those have edges that lead
off the way, to weights: `x @ w + b` has one to x, on the way, and two off it. The first half runs the way alone and
notes the gradient that arrives at each such node. The second half starts at those nodes with what was noted, and runs
what lies off the way. A node written in Python (torch.autograd.Function) computes all of its gradients at once, so that
what leads off the way from there is the first half's; thus nothing is done twice. The idea is that of the zero bubble
schedules (Qi et al. 2023).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

__all__ = ["WeightGradients", "input_gradient"]

Edges = dict[Node, list[GradientEdge]]
"""Nodes on the way, in an order that is the same wherever the same graph was built, with edges that lead off it."""
_Noted = dict[Node, tuple[Tensor | None, ...]]


@dataclass(frozen=True)
class WeightGradients:
    """The second half, still to be done. It keeps alive what it needs of the graph."""

    roots: list[Any]  # GradientEdge or Tensor
    gradients: list[Tensor]
    edges_off: Edges
    noted: _Noted

    def accumulate(self) -> None:
        """Add the gradients of all weights to their `.grad`, hooks included. To be called once."""
        roots, gradients = list(self.roots), list(self.gradients)
        for node, edges in self.edges_off.items():
            arrived = [(GradientEdge(node, i), g) for i, g in enumerate(self.noted.get(node, ())) if g is not None]
            if not arrived:
                continue
            starts, given = zip(*arrived, strict=True)
            with _hooks_at_rest(edges):
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
    end = _start(output)
    given = torch.ones_like(output) if gradient is None else gradient
    if source is None or not source.requires_grad:
        return None, WeightGradients([end], [given], {}, {})
    goal = get_gradient_edge(source)
    edges_off = _ways_off(get_gradient_edge(output).node, goal.node)
    if edges_off is None:
        return None, WeightGradients([end], [given], {}, {})
    early, rest = _sort_out(edges_off)
    noted: _Noted = {}
    handles = [node.register_prehook(_note(noted, node)) for node in rest]
    try:
        with _hooks_at_rest(early):
            found = torch.autograd.grad([end], [goal, *early], [given], retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    sums = [(edge, value) for edge, value in zip(early, found[1:], strict=True) if value is not None]
    return found[0], WeightGradients([e for e, _ in sums], [v for _, v in sums], rest, noted)


def _start(output: Tensor) -> Any:
    """The start of the backward of ``output``: its node, or the tensor where torch (2.11) cannot begin there."""
    edge = get_gradient_edge(output)
    try:
        edge.node._input_metadata  # noqa: B018
    except RuntimeError:
        return output
    return edge


def _note(noted: _Noted, node: Node) -> Callable[[tuple[Tensor, ...]], None]:
    def hook(gradients: tuple[Any, ...]) -> None:
        noted[node] = gradients

    return hook


@contextmanager
def _hooks_at_rest(edges: Iterable[GradientEdge]) -> Iterator[None]:
    """Keep the tensor hooks of weights (`register_hook`) for when their gradient is accumulated, not just computed."""
    held = [getattr(getattr(edge.node, "variable", None), "_backward_hooks", None) for edge in edges]
    kept = [(hooks, dict(hooks)) for hooks in held if hooks]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in kept:
            hooks.update(own)


def _ways_off(start: Node, goal: Node) -> Edges | None:
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


def _sort_out(edges_off: Edges) -> tuple[list[GradientEdge], Edges]:
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

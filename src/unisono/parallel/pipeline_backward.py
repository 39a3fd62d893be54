"""Backward of a stage in two halves: the gradient of its input, which the rank before waits for, then the weights'.

In the graph of a stage some nodes lie on the way from its output to its input, and some of those have edges that lead
off the way, to weights: `x @ w + b` has one to x, on the way, and two off it. The first half runs the way alone and
notes the gradient that arrives at each such node. The second half starts at those nodes with what was noted, and runs
what lies off the way. A node written in Python (torch.autograd.Function) computes all of its gradients at once, so that
what leads off the way from there is the first half's; thus nothing is done twice. The idea is that of the zero bubble
schedules (Qi et al. 2023).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from unisono.parallel.pipeline_graph import Edges, sort_out, ways_off

__all__ = ["WeightGradients", "input_gradient"]

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
    edges_off = ways_off(get_gradient_edge(output).node, goal.node)
    if edges_off is None:
        return None, WeightGradients([end], [given], {}, {})
    early, rest = sort_out(edges_off)
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
    """Where the backward of ``output`` begins; the tensor itself where torch (2.11) cannot begin at its node."""
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

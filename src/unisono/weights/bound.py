"""The time that no plan for some layouts can do without: bytes that must leave the senders or arrive somewhere."""

from typing import TYPE_CHECKING

import numpy as np

from unisono.schedule import Topology

if TYPE_CHECKING:
    from unisono.weights.plan import Plan

__all__ = ["bound_of"]


def bound_of(plan: "Plan", topology: Topology) -> float:
    """Seconds: the largest of what a target must receive and what the senders must send, at the fastest link of each.

    Every chunk must leave the senders once at least, all of them together; of a single sender nothing is assumed.
    """
    if not plan.chunks:
        return 0.0
    ranks = np.arange(plan.world_size)
    alpha = topology.alpha(ranks[:, None], ranks[None, :])
    beta = topology.beta(ranks[:, None], ranks[None, :])
    np.fill_diagonal(alpha, np.inf)
    np.fill_diagonal(beta, np.inf)
    senders = plan.sender.world_size
    received = np.array(plan.received) * beta.min(axis=0)
    unique = sum(chunk.nbytes for chunk in plan.chunks) * float(beta[:senders].min()) / senders
    return float(max(received[senders:].max(), unique) + alpha.min())

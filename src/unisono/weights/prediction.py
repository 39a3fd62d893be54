"""How long a push takes: between ranks of one host by the updates that `unisono tune weights` measured there.

    seconds = call * turns + piece * pieces + byte * moved

Cores work side by side, and ranks that outnumber them by turns: `turns` is ranks by cores; `pieces` and `moved` are
what all ranks pack and read together, by cores, and no less than the busiest rank moves. A byte has one cost where the
update stays in caches and another where it is stored past them. The costs are fitted to the measured updates of the
nearest number of ranks, each way of moving apart: to whole replicas from memory of the sender's own (``update``) or
shared (``shared``), into one published copy (``mapped``), and between sides that cut their tensors (``reshard``).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from unisono.schedule import Link, Topology, preset
from unisono.selection import Measured, Push
from unisono.simulation import fit_costs
from unisono.transport.process import cores

if TYPE_CHECKING:
    from unisono.weights.plan import Plan

__all__ = ["CACHED", "Prediction", "predict", "push_seconds"]

CACHED = 4 << 20
"""Bytes of an update that are better left in caches."""


class Prediction(NamedTuple):
    """Seconds of a push, and those that no plan can do without; ``where``: on what."""

    where: str
    seconds: float
    bound: float


class _Amounts(NamedTuple):
    """What an update does: see above; bytes that stay in caches, and others."""

    turns: float
    pieces: float
    cached: float
    past: float


class _Costs(NamedTuple):
    """Seconds of each of `_Amounts`."""

    call: float
    piece: float
    cached: float
    past: float

    def seconds(self, amounts: _Amounts) -> float:
        return sum(cost * amount for cost, amount in zip(self, amounts, strict=True))


def predict(plan: "Plan", topology: str | Topology | None = None) -> Prediction:
    """On a topology, simulated; None: on this host, as updates measured here say, or on the preset `shared_memory`."""
    pushes = Measured.load().pushes if topology is None else []
    way = _way(plan, pushes)
    costs = _costs(pushes, way, plan.world_size)
    if costs is None:
        where = preset(topology or "shared_memory", plan.world_size)
        return Prediction(where.name, plan.simulate(where).time, plan.bound(where))
    amounts = _amounts(plan, way)
    link = Link("shared_memory", costs.call, costs.past if amounts.past else costs.cached, switched=False)
    bound = plan.bound(Topology("this host", 1, plan.world_size, link))
    return Prediction("this host, as measured", costs.seconds(amounts), bound)


def push_seconds(plan: "Plan", measured: Measured, way: str) -> float | None:
    """Seconds of a push this way on this host; None if no update was measured this way."""
    costs = _costs(measured.pushes, way, plan.world_size)
    return costs.seconds(_amounts(plan, way)) if costs is not None and plan.chunks else None


def _way(plan: "Plan", pushes: Sequence[Push]) -> str:
    """Whole replicas of one sender, or what is cut over ranks, if that was measured."""
    cut = max(plan.sender.world_size, *(each.world_size for each in plan.receivers)) > 1
    return "reshard" if cut and any(push.way == "reshard" for push in pushes) else "update"


def _amounts(plan: "Plan", way: str) -> _Amounts:
    pieces = sum(len(chunk.pieces) * (1 + len(chunk.targets)) for chunk in plan.chunks)
    unique = sum(chunk.nbytes for chunk in plan.chunks)
    packed = [0] * plan.world_size
    for chunk in plan.chunks:
        packed[chunk.source] += chunk.nbytes
    busiest = max(map(max, zip(packed, plan.received, strict=True)), default=0)
    return _shared_out(plan.world_size, pieces, unique, unique if way == "mapped" else plan.nbytes, busiest)


def _amounts_of(push: Push) -> _Amounts:
    """Of a measured update, whose every tensor is whole, or cut into rows at the senders and columns elsewhere."""
    receivers = push.ranks - push.senders
    if push.way == "reshard":
        each = push.nbytes // min(push.senders, receivers)
        return _shared_out(push.ranks, 2 * push.tensors * push.senders * receivers, push.nbytes, push.nbytes, each)
    read = push.nbytes * (1 if push.way == "mapped" else receivers)
    return _shared_out(push.ranks, push.tensors * (1 + receivers), push.nbytes, read, push.nbytes)


def _shared_out(ranks: int, pieces: int, unique: int, read: int, busiest: int) -> _Amounts:
    here = min(cores(), ranks)
    moved = max((unique + read) / here, busiest)
    past = unique > CACHED
    return _Amounts(ranks / here, pieces / here, 0.0 if past else moved, moved if past else 0.0)


def _costs(pushes: Sequence[Push], way: str, ranks: int) -> _Costs | None:
    """The costs that come nearest to the updates measured this way, of the nearest number of ranks."""
    mine = [push for push in pushes if push.way == way]
    if not mine:
        return None
    nearest = min({push.ranks for push in mine}, key=lambda count: (abs(count - ranks), count))
    near = [push for push in mine if push.ranks == nearest]
    call, piece, cached, past = fit_costs([_amounts_of(push) for push in near], [push.seconds for push in near])
    return _Costs(call, piece, cached or past, past or cached)

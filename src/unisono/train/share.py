"""What each rank of a mesh holds and communicates: plain values that travel between processes. Never imports torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["AxisTraffic", "MeshReport", "RankShare", "spans"]


@dataclass(frozen=True)
class RankShare:
    """One rank's part of model and batch.

    place: its coordinate on each axis with more than one rank. layers to positions: numbers as `spans` shows them.
    parameters: how many. state_nbytes: of weights, gradients and optimizer. activation_nbytes: the most that backward
    waits for at any moment of a step.
    """

    place: Mapping[str, int]
    layers: str
    heads: str
    sequences: str
    positions: str
    parameters: int
    state_nbytes: int
    activation_nbytes: int


@dataclass(frozen=True)
class AxisTraffic:
    """Along one axis, per rank and step, averaged: calls, bytes of the rank's tensors, seconds of its thread."""

    calls: float
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class MeshReport:
    """Who holds what, in rank order; the traffic of each axis; the pipeline's bubble, measured and predicted, 0 to 1.

    `bubble` is None without a pipeline: the median over some steps, averaged over the pipelines.
    """

    shares: list[RankShare]
    traffic: Mapping[str, AxisTraffic]
    bubble: tuple[float, float] | None


def spans(numbers: Iterable[int]) -> str:
    """Rising numbers as people write them: `0-3, 6`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)

"""Predict: when every message of a schedule travels on a topology, at 8 or at 24,576 ranks. Never imports torch."""

from unisono.simulate.events import EVENT_LIMIT, Events
from unisono.simulate.path import CriticalPath, Hop
from unisono.simulate.predict import simulate
from unisono.simulate.timeline import Timeline, bus_factor
from unisono.simulate.traffic import Traffic

__all__ = ["EVENT_LIMIT", "CriticalPath", "Events", "Hop", "Timeline", "Traffic", "bus_factor", "simulate"]

"""Algorithms: pure builders of schedules, one family per file, found by name in the registry. Never imports torch."""

from unisono.algorithms.registry import Entry, algorithm, build, entries, entry, names

__all__ = ["Entry", "algorithm", "build", "entries", "entry", "names"]

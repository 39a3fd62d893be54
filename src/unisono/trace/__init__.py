"""The communication time of a program: every call of every rank, and its waits. Never imports torch."""

import os
from pathlib import Path

from unisono.backend.patches import at_first_group

__all__ = ["COMPUTE", "FOLDER", "KEPT", "arm"]

FOLDER, COMPUTE = "UNISONO_TRACE", "UNISONO_TRACE_COMPUTE"
KEPT = 200_000
"""Calls kept per group, and times kept of each kind: the last ones."""


def arm() -> None:
    """Start collecting into the folder that the environment names when this process makes its first group."""
    os.environ.setdefault("UNISONO_FLIGHT", str(KEPT))
    at_first_group.append(_start)


def _start() -> None:
    from unisono.trace.collect import Collector

    Collector(Path(os.environ[FOLDER]).absolute(), os.environ.get(COMPUTE) == "1").start()

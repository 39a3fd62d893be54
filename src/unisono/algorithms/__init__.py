"""Algorithms: pure builders of schedules, one family per file, found by name in the registry. Never imports torch."""

from unisono.algorithms.registry import (
    AlgorithmInfo,
    algorithm_info,
    build,
    list_algorithms,
    names,
    register_algorithm,
)

__all__ = ["AlgorithmInfo", "algorithm_info", "build", "list_algorithms", "names", "register_algorithm"]

"""Weights of a model from trainer ranks to inference replicas: planned, checked, versioned, never a mix of two."""

from unisono.weights.inspection import layout
from unisono.weights.layout import Layout, Shard
from unisono.weights.plan import Plan, plan
from unisono.weights.rules import cast, fuse, ignore, quantize, rename, split, tie, transpose

__all__ = [
    "Layout",
    "Plan",
    "Shard",
    "cast",
    "fuse",
    "ignore",
    "layout",
    "plan",
    "quantize",
    "rename",
    "split",
    "tie",
    "transpose",
]

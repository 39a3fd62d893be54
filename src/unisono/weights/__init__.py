"""Weights of a model from trainer ranks to inference replicas: planned, checked, versioned, never a mix of two."""

from unisono.weights.engine import Engine, ModuleEngine
from unisono.weights.inspection import layout
from unisono.weights.layout import Layout
from unisono.weights.plan import Plan, plan
from unisono.weights.receiver import Receiver
from unisono.weights.rules import cast, fuse, ignore, quantize, rename, split, tie, transpose
from unisono.weights.sender import Sender
from unisono.weights.sharding import Shard
from unisono.weights.share import share
from unisono.weights.sync import sync
from unisono.weights.update import Report, Update

__all__ = [
    "Engine",
    "Layout",
    "ModuleEngine",
    "Plan",
    "Receiver",
    "Report",
    "Sender",
    "Shard",
    "Update",
    "cast",
    "fuse",
    "ignore",
    "layout",
    "plan",
    "quantize",
    "rename",
    "share",
    "split",
    "sync",
    "tie",
    "transpose",
]

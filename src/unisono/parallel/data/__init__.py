"""Data parallelism: every rank holds the model and computes on its own part of a batch; gradients are averaged.

Optimizer states, gradients and parameters are sharded by torch itself, on unisono as on any backend:
ZeroRedundancyOptimizer (ZeRO-1), fully_shard(reshard_after_forward=False) (ZeRO-2), fully_shard (ZeRO-3).
"""

from unisono.parallel.agreement import assert_replicas_equal
from unisono.parallel.data.ddp import DistributedDataParallel, mean_count
from unisono.parallel.data.sync_batch_norm import SyncBatchNorm

__all__ = ["DistributedDataParallel", "SyncBatchNorm", "assert_replicas_equal", "mean_count"]

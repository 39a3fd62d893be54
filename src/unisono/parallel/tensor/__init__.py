"""Tensor parallelism: one layer's weights over several ranks, equal to one process in values and gradients.

    mlp = ParallelMLP(nn.Linear(512, 2048), nn.Linear(2048, 512), group=group)
    y = mlp(x)                                       # x and y the same on every rank of the group

    embedding = VocabParallelEmbedding(50257, 512, group=group)
    loss = parallel_cross_entropy(embedding.logits(hidden), targets, 50257, group=group)

Every layer takes the process group whose ranks share it (None: the default group) and keeps nothing outside itself, so
the groups may be any axis of a mesh. Layers are cut from whole ones, or drawn with the same seed on every rank.

torch's own tensor parallelism (DTensor, parallelize_module) runs on unisono too. These are plain modules: sizes that
the ranks do not divide take no padding, query, key and value may be one matrix, and communication overlaps with
products.
"""

from unisono.parallel.shards import split_evenly
from unisono.parallel.tensor.attention import ParallelAttention
from unisono.parallel.tensor.cross_entropy import parallel_cross_entropy
from unisono.parallel.tensor.embedding import VocabParallelEmbedding
from unisono.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from unisono.parallel.tensor.mlp import ColumnwiseMLP, ParallelMLP
from unisono.parallel.tensor.regions import (
    all_gather_to_region,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    reduce_scatter_from_region,
    scatter_to_region,
    sum_gradients,
)
from unisono.parallel.tensor.rms_norm import all_reduce_rms_norm, reduce_scatter_rms_norm, rms_norm_all_gather
from unisono.parallel.tensor.state_dict import full_state_dict, load_full_state_dict

__all__ = [
    "ColumnParallelLinear",
    "ColumnwiseMLP",
    "ParallelAttention",
    "ParallelMLP",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "all_gather_to_region",
    "all_reduce_rms_norm",
    "copy_to_region",
    "full_state_dict",
    "gather_from_region",
    "load_full_state_dict",
    "parallel_cross_entropy",
    "reduce_from_region",
    "reduce_scatter_from_region",
    "reduce_scatter_rms_norm",
    "rms_norm_all_gather",
    "scatter_to_region",
    "split_evenly",
    "sum_gradients",
]

"""Tensor parallelism: one layer's weights over several ranks, equal to one process in values and gradients.

    mlp = ParallelMLP(nn.Linear(512, 2048), nn.Linear(2048, 512), group=group)
    y = mlp(x)                                       # x and y the same on every rank of the group

    embedding = VocabularyParallelEmbedding(50257, 512, group=group)
    loss = parallel_cross_entropy(embedding.logits(hidden), targets, 50257, group=group)

Every layer takes the process group whose ranks share it (None: the default group) and keeps nothing outside itself, so
the groups may be any axis of a mesh. Layers are cut from whole ones, or drawn with the same seed on every rank.

* `regions`: the functions between whole and split tensors, with their gradients
* `linear`, `mlp`, `attention`, `vocabulary`, `cross_entropy`: the layers
* `overlap`: communication while multiplying
* `full_weights`: whole state_dicts
"""

from unisono.parallel.attention import ParallelAttention
from unisono.parallel.cross_entropy import parallel_cross_entropy
from unisono.parallel.full_weights import full_state_dict, load_full_state_dict
from unisono.parallel.linear import ColumnParallelLinear, RowParallelLinear
from unisono.parallel.mlp import GatheredMLP, ParallelMLP
from unisono.parallel.regions import (
    all_gather_to_region,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    reduce_scatter_from_region,
    scatter_to_region,
    sum_gradients,
)
from unisono.parallel.shards import split_evenly
from unisono.parallel.vocabulary import VocabularyParallelEmbedding

__all__ = [
    "ColumnParallelLinear",
    "GatheredMLP",
    "ParallelAttention",
    "ParallelMLP",
    "RowParallelLinear",
    "VocabularyParallelEmbedding",
    "all_gather_to_region",
    "copy_to_region",
    "full_state_dict",
    "gather_from_region",
    "load_full_state_dict",
    "parallel_cross_entropy",
    "reduce_from_region",
    "reduce_scatter_from_region",
    "scatter_to_region",
    "split_evenly",
    "sum_gradients",
]

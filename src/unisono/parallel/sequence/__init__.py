"""Long sequences: attention over one that is spread over the ranks, equal to attention over the whole.

    tokens = shard_sequence(tokens, dim=1, group=group)           # this rank's positions, in balance
    places = sequence_positions(total, group)                     # for the position embedding
    y = ring_attention(query, key, value, group=group, causal=True)

    cache = ShardedKVCache(group)                                 # decoding
    cache.append(keys_of_prompt, values_of_prompt)
    y = cache.attend(query)

torch's context_parallel is for CUDA's attention kernels; this runs on any device, for any length, and decodes.
"""

from unisono.parallel.sequence.layout import sequence_positions, shard_sequence, unshard_sequence
from unisono.parallel.sequence.ring_attention import ring_attention
from unisono.parallel.sequence.tree_attention import ShardedKVCache, tree_attention

__all__ = [
    "ShardedKVCache",
    "ring_attention",
    "sequence_positions",
    "shard_sequence",
    "tree_attention",
    "unshard_sequence",
]

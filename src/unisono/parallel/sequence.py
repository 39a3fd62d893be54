"""Long sequences: attention over one that is spread over the ranks, equal to attention over the whole.

    tokens = shard_sequence(tokens, dim=1, group=group)           # this rank's positions, in balance
    places = sequence_positions(total, group)                     # for the position embedding
    y = ring_attention(query, key, value, group=group, causal=True)

    cache = ShardedCache(group)                                   # decoding
    cache.append(keys_of_prompt, values_of_prompt)
    y = cache.attend(query)

* `ring_attention`: training, over one ring or a ring of rings; `rings` moves the blocks, `block_attention` computes
* `sequence_layout`: who holds which positions
* `tree_attention`: one query against a cache on all ranks
"""

from unisono.parallel.ring_attention import ring_attention
from unisono.parallel.sequence_layout import sequence_positions, shard_sequence, unshard_sequence
from unisono.parallel.tree_attention import ShardedCache, tree_attention

__all__ = [
    "ShardedCache",
    "ring_attention",
    "sequence_positions",
    "shard_sequence",
    "tree_attention",
    "unshard_sequence",
]

"""Expert parallelism: rows to the ranks of their experts and back, without the host knowing how many go where.

    counts = (rank_of_row.unsqueeze(1) == torch.arange(world_size)).sum(0)  # rows sorted by the rank of their expert
    at_experts, received = all_to_all_rows(rows, counts, capacity, group=group)
    back, _ = all_to_all_rows(experts(at_experts), received, len(rows), group=group)

torch's all_to_all_single takes the numbers of rows as lists alone.
"""

from unisono.parallel.expert.all_to_all import all_to_all_rows

__all__ = ["all_to_all_rows"]

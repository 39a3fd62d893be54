"""Expert parallelism: rows to the ranks of their experts and back, without the host knowing how many go where.

counts = torch.bincount(rank_of_row, minlength=world_size)          # rows sorted by the rank of their expert
at_experts, received = all_to_all_rows(rows, counts, capacity, group=group)
back, _ = all_to_all_rows(experts(at_experts), received, len(rows), group=group)
"""

from unisono.parallel.expert.all_to_all import all_to_all_rows

__all__ = ["all_to_all_rows"]

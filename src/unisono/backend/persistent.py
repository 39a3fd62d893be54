"""Persistent calls, the idea of MPI-4: a collective on given tensors is prepared once, then made again and again.

    call = unisono.prepare("all_reduce", x)
    for batch in data:
        ...                 # fills x
        call()              # the same as dist.all_reduce(x), without torch's wrapper and options

Every call is guarded like any other, and a rank may use a persistent call where its peers use torch's functions.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from unisono.backend.persistent_call import PersistentCall

__all__ = ["prepare"]


def prepare(
    collective: str,
    output: "torch.Tensor | None" = None,
    input: "torch.Tensor | None" = None,
    *,
    op: Any = None,
    root: int = 0,
    group: "dist.ProcessGroup | None" = None,
) -> "PersistentCall":
    """Prepares a collective on these tensors; the object it returns makes the call each time it is called.

    Args:
        collective: all_reduce, reduce or broadcast of one tensor, in place; all_gather, reduce_scatter or all_to_all
            from ``input`` into ``output``, with the shapes of torch's ``*_single`` functions; or barrier.
        output: a contiguous CPU tensor of any dtype that the collective takes.
        input: the same; only for collectives that have an input apart.
        op: the reduce op, SUM if none is given; PREMUL_SUM, which makes a copy of its input, is refused.
        root: the rank within the group that a reduce ends, or a broadcast begins at.
        group: a group of unisono; None for the default group.

    Raises:
        UsageError: the collective, the group or the tensors do not suit; says which, and why.

    """
    from unisono.backend.persistent_call import prepared

    return prepared(collective, output, input, op, root, group)

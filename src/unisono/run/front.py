"""The front door: any schedule, any transport, any dtype and reduce op, and the user's tensors as they are.

run(named("double_tree", "all_reduce", 4), x, transport)
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from unisono.algorithms import Entry, entry
from unisono.errors import UsageError
from unisono.run.arithmetic import arithmetic
from unisono.run.executor import execute
from unisono.run.layout import check_sizes, equal_blocks, layout
from unisono.run.operands import Operands
from unisono.run.plan import Plan, plan
from unisono.run.record import Record
from unisono.schedule import Schedule
from unisono.transport.base import Transport

__all__ = ["named", "run"]

Tensors = Sequence[torch.Tensor]
_ONE_TENSOR = ("all_reduce", "broadcast", "reduce")


def named(
    algorithm: str, collective: str, world_size: int, root: int = 0, chunks: int = 1, **options: object
) -> Schedule:
    """The schedule of an algorithm by name, cached: the same arguments give the same object.

    Raises UsageError, naming the algorithm, if there is none of that name for the collective, it does not fit the
    number of ranks or the options, or it can only be simulated.
    """
    found = entry(algorithm, collective)
    if found.simulation_only:
        raise UsageError(
            f"algorithm {algorithm} needs a switch that sums: simulation only; choose another for {collective}"
        )
    return _built(found, world_size, root, chunks, tuple(sorted(options.items())))


@lru_cache(maxsize=256)
def _built(found: Entry, world_size: int, root: int, chunks: int, options: tuple[tuple[str, object], ...]) -> Schedule:
    return found.build(world_size, root, chunks, **dict(options))


def run(
    schedule: Schedule,
    tensor: torch.Tensor | Tensors | None,
    transport: Transport,
    output: torch.Tensor | Tensors | None = None,
    *,
    op: str = "SUM",
    factor: float = 1.0,
    sizes: Sequence[int] | None = None,
    deterministic: bool = False,
    record: Record | None = None,
) -> None:
    """Runs this rank's share of a schedule; every rank of the transport calls it with the same schedule and options.

    all_reduce, broadcast and reduce work on `tensor` in place (reduce changes the root's alone), or fill `output`. The
    others read `tensor` and fill `output`; what is one block per rank is a tensor that holds the blocks one after the
    other, or a sequence of tensors (operands.py tells who gives and takes what; give None for nothing). Tensors are
    contiguous, of any dtype and shape; `tensor` and `output` must not overlap otherwise. barrier takes None.

    `op` is a reduce op of torch by name, `factor` that of PREMUL_SUM. `sizes`: elements of every block where they are
    not equal: n of them; n * n for all_to_all, by source, then destination. `deterministic`: one order of summation
    (unreduced.py). `record` is told of every message.

    Raises UsageError if the schedule does not fit the transport or the tensors, and what the transport raises.
    """
    c = schedule.collective
    if c.world_size != transport.world_size:
        raise UsageError(
            f"{schedule.name} {c.name} is made for {c.world_size} ranks; this transport joins {transport.world_size}"
        )
    share = plan(schedule, transport.rank, deterministic)
    if c.name == "barrier":
        tensor, op, sizes = torch.zeros(c.num_chunks, dtype=torch.uint8), "BOR", None
        output = tensor
    if sizes is not None:
        check_sizes(c, sizes)
    sources, results = _operands(share, tensor, output, sizes)
    if sizes is None:
        sizes = equal_blocks(c, [t.numel() for t in sources], [t.numel() for t in results])
    first = next(iter((*sources, *results)), None)
    dtype = first.dtype if first is not None else torch.uint8
    numbers = arithmetic(dtype, op if c.reduces else "", factor, c.world_size, share.deterministic)
    where = layout(share, tuple(sizes))
    operands = Operands(where, sources, results, numbers)
    work = operands.load(where)
    execute(where, transport, work, numbers, record)
    operands.store(where, work)


def _operands(
    share: Plan,
    tensor: torch.Tensor | Tensors | None,
    output: torch.Tensor | Tensors | None,
    sizes: Sequence[int] | None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One flat tensor per block given and taken."""
    into, out = share.blocks_before, share.blocks_after
    if share.collective.name in _ONE_TENSOR and output is None:
        output = tensor
    return _flat(share, "tensor", tensor, into, sizes), _flat(share, "output", output, out, sizes)


def _flat(
    share: Plan, what: str, given: torch.Tensor | Tensors | None, wanted: Sequence[int], sizes: Sequence[int] | None
) -> list[torch.Tensor]:
    name = f"{share.name} {share.collective.name}"
    if not wanted:
        return []
    if given is None:
        raise UsageError(f"{name}: rank {share.rank} needs its {what}, got None")
    tensors = [given] if isinstance(given, torch.Tensor) else list(given)
    if not all(t.is_contiguous() for t in tensors):
        raise UsageError(f"{name}: the {what} of rank {share.rank} is not contiguous; give {what}.contiguous()")
    flat = [t.detach().view(-1) for t in tensors]
    if len(flat) > 1 or len(wanted) == 1:
        return flat
    equal = flat[0].numel() // len(wanted)
    parts = [equal if sizes is None else sizes[block] for block in wanted]
    if sum(parts) != flat[0].numel():
        blocks = f"blocks of {parts} elements" if sizes is not None else f"{len(wanted)} equal blocks"
        raise UsageError(f"{name}: the {what} of rank {share.rank} has {flat[0].numel()} elements, not {blocks}")
    return list(torch.split(flat[0], parts))

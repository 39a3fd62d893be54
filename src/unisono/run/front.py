"""The front door: any schedule, any transport, any dtype and reduce op, and the user's tensors as they are.

run(named("double_tree", "all_reduce", 4), x, transport)
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from unisono.algorithms import Entry, entry
from unisono.errors import UsageError
from unisono.program import Program, lower
from unisono.run.over_transport import execute
from unisono.run.reduce import Reducer, reducer
from unisono.schedule import Collective, Schedule
from unisono.transport.base import Transport

__all__ = ["named", "run"]

Tensors = Sequence[torch.Tensor]
_IN_PLACE = ("all_reduce", "broadcast", "reduce")


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
) -> None:
    """Runs this rank's share of a schedule; every rank of the transport calls it with the same schedule and options.

    all_reduce, broadcast and reduce work on `tensor` in place (reduce changes the root's alone), or fill `output`. The
    others read `tensor` and fill `output`; what is one block per rank is a tensor that holds the blocks one after the
    other, or a sequence of tensors (give None for nothing):

        collective       tensor                     output
        all_reduce       the whole                  the whole
        reduce           the whole                  the whole at the root
        broadcast        the whole at the root      the whole
        reduce_scatter   a block per rank           its own block
        all_gather       its own block              a block per rank
        gather           its own block              a block per rank at the root
        scatter          a block per rank           its own block
                         at the root
        all_to_all       a block per rank (to)      a block per rank (from)
        barrier          None                       None

    Tensors are contiguous, of any dtype and shape; `tensor` and `output` must not overlap otherwise. What a rank only
    gives is never written.

    `op` is a reduce op of torch by name, `factor` that of PREMUL_SUM. `sizes`: elements of every block where they are
    not equal: n of them; n * n for all_to_all, by source, then destination. `deterministic`: one order of summation
    (program/unreduced.py).

    Raises UsageError if the schedule does not fit the transport or the tensors, and what the transport raises.
    """
    c = schedule.collective
    if c.world_size != transport.world_size:
        raise UsageError(
            f"{schedule.name} {c.name} is made for {c.world_size} ranks; this transport joins {transport.world_size}"
        )
    share = lower(schedule, transport.rank, "messages", deterministic)
    if c.name == "barrier":
        tensor, op, sizes = torch.zeros(c.num_chunks, dtype=torch.uint8), "BOR", None
        output = tensor
    if sizes is not None:
        _check_sizes(c, sizes)
    if c.name in _IN_PLACE and output is None:
        output = tensor
    into, out = share.blocks_in[share.rank], share.blocks_out[share.rank]
    sources, given = _flat(share, "tensor", tensor, into, sizes)
    results, wanted = _flat(share, "output", output, out, sizes)
    if sizes is None:
        sizes = _equal_blocks(c, given or wanted)
    _check(share, "source", given, into, sizes)
    _check(share, "result", wanted, out, sizes)
    sources, combine = _arithmetic(c, sources, op, factor)
    execute(share, transport, sources, results, sizes, combine)


def _arithmetic(
    c: Collective, sources: list[torch.Tensor], op: str, factor: float
) -> tuple[list[torch.Tensor], Reducer | None]:
    """What goes into the sum, and how it is taken; PREMUL_SUM is a SUM of what was multiplied before."""
    if not c.reduces:
        return sources, None
    combine = reducer(sources[0].dtype, op, factor)
    if op != "PREMUL_SUM":
        return sources, combine
    return [combine.prepared(source) for source in sources], reducer(combine.dtype, "SUM")


def _equal_blocks(c: Collective, known: Sequence[int]) -> tuple[int, ...]:
    """Sizes of all blocks, of which these are known, if they are equal."""
    if len(set(known)) > 1:
        raise UsageError(f"{c.name}: blocks of {list(known)} elements are not equal; give the sizes of all blocks")
    return (known[0] if known else 0,) * (c.num_chunks // c.pieces)


def _check_sizes(c: Collective, sizes: Sequence[int]) -> None:
    blocks = c.num_chunks // c.pieces
    if len(sizes) != blocks or min(sizes) < 0:
        raise UsageError(
            f"{c.name} over {c.world_size} ranks has {blocks} blocks, got {len(sizes)} sizes: {list(sizes)}"
        )


def _flat(
    share: Program, what: str, given: torch.Tensor | Tensors | None, wanted: Sequence[int], sizes: Sequence[int] | None
) -> tuple[list[torch.Tensor], list[int]]:
    """An operand as flat tensors, one for all blocks or one for each, and the elements of each block."""
    if not wanted:
        return [], []
    if given is None:
        raise UsageError(f"{share.name}: rank {share.rank} needs its {what}, got None")
    tensors = [given] if isinstance(given, torch.Tensor) else list(given)
    if not all(t.is_contiguous() for t in tensors):
        raise UsageError(f"{share.name}: the {what} of rank {share.rank} is not contiguous; give {what}.contiguous()")
    flat = [t.detach().view(-1) for t in tensors]
    if len(flat) != 1 or len(wanted) == 1:
        return flat, [t.numel() for t in flat]
    equal = flat[0].numel() // len(wanted)
    parts = [equal if sizes is None else sizes[block] for block in wanted]
    if sum(parts) != flat[0].numel():
        blocks = f"blocks of {parts} elements" if sizes is not None else f"{len(wanted)} equal blocks"
        raise UsageError(f"{share.name}: the {what} of rank {share.rank} has {flat[0].numel()} elements, not {blocks}")
    return flat, parts


def _check(share: Program, what: str, given: Sequence[int], wanted: Sequence[int], sizes: Sequence[int]) -> None:
    """One block for each that is wanted, of the size that is told."""
    if len(given) != len(wanted):
        raise UsageError(f"{share.name}: rank {share.rank} has {len(wanted)} {what}s, got {len(given)}")
    for block, numel in zip(wanted, given, strict=True):
        if numel != sizes[block]:
            raise UsageError(
                f"{share.name}: {what} {block} of rank {share.rank} has {numel} elements, expected {sizes[block]}"
            )

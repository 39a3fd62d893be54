"""`run`: any schedule on real tensors, over a process group of any backend, or over threads of one process.

run(schedule, x)                    # in a process group: x is this rank's tensor
run(schedule, [x0, x1, x2, x3])     # without one: a thread for every rank
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist

from unisono.errors import UsageError
from unisono.program import Program, lower
from unisono.runtime.over_transport import execute
from unisono.runtime.reduce import Reducer, reducer
from unisono.schedule import Collective, PipelineSchedule, Schedule
from unisono.transport.base import Transport
from unisono.transport.loopback import run_loopback
from unisono.transport.torch_p2p import TorchP2P

__all__ = ["run", "run_over"]

Tensors = Sequence[torch.Tensor]
_IN_PLACE = ("all_reduce", "broadcast", "reduce")
_SPLIT, _JOINED = ("reduce_scatter", "scatter"), ("all_gather", "gather")


def run(
    schedule: Schedule | PipelineSchedule,
    tensor: torch.Tensor | Tensors | None = None,
    output: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    op: str = "SUM",
    factor: float = 1.0,
    deterministic: bool = False,
) -> torch.Tensor | list[torch.Tensor | None] | None:
    """Run a schedule on real tensors and return what this rank ends up with, None where that is nothing.

    In a process group, the default one or `group`, of any backend, every rank calls it with its own tensor. Without
    one, every rank is a thread of this process: `tensor`, `output` and the result are lists with one item per rank.

    | collective | tensor of a rank | result, n ranks |
    | --- | --- | --- |
    | all_reduce | any shape | the same shape |
    | reduce | any shape | the same shape at the root, None elsewhere |
    | broadcast | any shape; the root's is sent | the same shape |
    | reduce_scatter | (n · k, ...) | (k, ...) |
    | scatter | (n · k, ...); the root's is sent | (k, ...) |
    | all_gather | (k, ...) | (n · k, ...) |
    | gather | (k, ...) | (n · k, ...) at the root, None elsewhere |
    | all_to_all | (n · k, ...) | (n · k, ...) |
    | barrier | None | None |

    All ranks give tensors of one shape and dtype. Inputs are never written, unless they are given as `output` too.

    Args:
        schedule: of a collective; prove it first: what is wrong with it is not found here.
        tensor: what the rank gives.
        output: a contiguous tensor to fill, in place of a new one.
        group: a group of torch.distributed with as many ranks as the schedule.
        op: reduce op, by torch's name: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM.
        factor: of PREMUL_SUM.
        deterministic: one order of summation, the ranks' (program/unreduced.py).

    Raises:
        UsageError: the schedule does not fit the group or the tensors, or needs a switch.
        PeerLostError: another rank has gone.
        DeadlockError: the schedule cannot end; found between threads alone.

    """
    if isinstance(schedule, PipelineSchedule):
        raise UsageError(f"{schedule.name} is of a pipeline, which runs a model: see unisono.parallel")

    def as_rank(transport: Transport, own: object, into: object) -> torch.Tensor | None:
        return _run_rank(schedule, transport, own, into, op, factor, deterministic)

    if group is not None or dist.is_initialized():
        return as_rank(TorchP2P(group), tensor, output)
    given, wanted = _per_rank(schedule, "tensor", tensor), _per_rank(schedule, "output", output)
    ranks = schedule.world_size
    return run_loopback(ranks, lambda transport: as_rank(transport, given[transport.rank], wanted[transport.rank]))


def _per_rank(schedule: Schedule, what: str, items: object) -> Sequence[object]:
    """An operand for every thread."""
    n = schedule.world_size
    if items is None:
        return [None] * n
    if not isinstance(items, list | tuple) or len(items) != n:
        raise UsageError(
            f"without a process group {schedule.name} runs in {n} threads and needs a list of {n} as its {what}: "
            f"one tensor per rank; to run it on this rank's tensor, call init_process_group first"
        )
    return items


def _run_rank(
    schedule: Schedule, transport: Transport, own: object, into: object, op: str, factor: float, deterministic: bool
) -> torch.Tensor | None:
    """One rank of `run`: new memory for the result, where there is one."""
    c, n = schedule.collective, schedule.world_size
    if c.name == "barrier":
        run_over(schedule, None, transport)
        return None
    if not isinstance(own, torch.Tensor):
        raise UsageError(f"{schedule.name}: rank {transport.rank} needs one tensor, got {type(own).__name__}")
    shape = list(own.shape)
    blocks = 1 if c.name in _IN_PLACE or c.name in _JOINED else n
    if blocks > 1 and (not shape or shape[0] % n):
        raise UsageError(f"{c.name} over {n} ranks cuts the first dimension in {n}, which {shape} does not allow")
    if c.name in _SPLIT:
        shape[0] //= n
    elif c.name in _JOINED:
        shape = [n * shape[0], *shape[1:]] if shape else [n]
    receives = c.name not in ("reduce", "gather") or transport.rank == c.root
    result = cast(torch.Tensor | None, into) if receives else None
    if receives and result is None:
        result = torch.empty(shape, dtype=own.dtype, device=own.device)
    run_over(schedule, own.contiguous(), transport, result, op=op, factor=factor, deterministic=deterministic)
    return result


def run_over(
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
    """Runs this rank's share of a schedule over a transport, the general form of `run`: blocks may be lists and uneven.

    Every rank of the transport calls it with the same schedule and options. all_reduce, broadcast and reduce work on
    `tensor` in place (reduce changes the root's alone), or fill `output`. The others read `tensor` and fill `output`;
    what is one block per rank is a tensor that holds the blocks one after the other, or a sequence of tensors (give
    None for nothing):

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

    Tensors are contiguous, of any dtype and shape; `tensor` and `output` must not overlap otherwise. Inputs are kept.

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
    """The tensor and the op of the sum; PREMUL_SUM is a SUM of multiplied inputs."""
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
    """One block for each that is wanted, of the given size."""
    if len(given) != len(wanted):
        raise UsageError(f"{share.name}: rank {share.rank} has {len(wanted)} {what}s, got {len(given)}")
    for block, numel in zip(wanted, given, strict=True):
        if numel != sizes[block]:
            raise UsageError(
                f"{share.name}: {what} {block} of rank {share.rank} has {numel} elements, expected {sizes[block]}"
            )

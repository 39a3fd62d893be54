"""`run`: any schedule on real tensors, over a process group of any backend, or over threads of one process.

run(schedule, x)                    # in a process group: x is this rank's tensor
run(schedule, [x0, x1, x2, x3])     # without one: a thread for every rank
"""

from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any

import torch
import torch.distributed as dist

from unisono.errors import UnisonoError, UsageError
from unisono.program import Program, lower
from unisono.runtime.call import name_of_dtype
from unisono.runtime.claim import Claim, agree, digest
from unisono.runtime.over_transport import execute
from unisono.runtime.reduce import Reducer, op_and_factor, reducer
from unisono.schedule import Collective, PipelineSchedule, Schedule
from unisono.transport.base import Transport
from unisono.transport.loopback import run_loopback
from unisono.transport.torch_p2p import TorchP2P

__all__ = ["run", "run_over"]

Tensors = Sequence[torch.Tensor]
_IN_PLACE = ("all_reduce", "broadcast", "reduce")
_SPLIT, _JOINED = ("reduce_scatter", "scatter"), ("all_gather", "gather")

_Share = Callable[[Transport], None]
"""What one rank does over a transport, its arguments checked."""


def run(
    schedule: Schedule | PipelineSchedule,
    tensor: torch.Tensor | Tensors | None = None,
    output: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    op: str | dist.ReduceOp | dist.ReduceOp.RedOpType = "SUM",
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

    All ranks give tensors of one shape and dtype, and the same schedule and op: they compare them first, in a group by
    one all_gather_object, and if anything differs all of them raise and nothing is moved. Inputs are never written,
    unless they are given as `output` too.

    Args:
        schedule: of a collective; prove it first: what is wrong with it is not found here.
        tensor: what the rank gives.
        output: a contiguous tensor of the same dtype to fill, in place of a new one.
        group: a group of torch.distributed with as many ranks as the schedule.
        op: reduce op, torch's or its name: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM.
        factor: of PREMUL_SUM, where the op is given by name; the ranks' may differ.
        deterministic: one order of summation, the ranks' (program/unreduced.py).

    Raises:
        UsageError: on all ranks, if on any the schedule does not fit the group or the tensors, or cannot be run.
        MismatchError: on all ranks, if their schedules, shapes, dtypes or ops differ.
        PeerLostError: another rank has gone.
        DeadlockError: the schedule cannot end; found between threads alone.

    """
    if group is not None or dist.is_initialized():
        transport = TorchP2P(group)
        mine = _Rank(schedule, transport.rank, transport.world_size, tensor, output, op, factor, deterministic)
        claims: list[Any] = [None] * transport.world_size
        Context().run(dist.all_gather_object, claims, mine.claim, group)  # not by the algorithm of a user's block
        agree(claims, mine.cause)
        return mine.go(transport)
    known = _collective(schedule)
    n = known.world_size
    given, wanted = _per_rank(known, "tensor", tensor), _per_rank(known, "output", output)
    ranks = [_Rank(schedule, r, n, given[r], wanted[r], op, factor, deterministic) for r in range(n)]
    agree([rank.claim for rank in ranks], next((rank.cause for rank in ranks if rank.cause), None))
    return run_loopback(n, lambda transport: ranks[transport.rank].go(transport))


def _collective(schedule: object) -> Schedule:
    """The schedule, if it is of a collective."""
    if isinstance(schedule, PipelineSchedule):
        raise UsageError(f"{schedule.name} is of a pipeline, which runs a model: see unisono.parallel")
    if not isinstance(schedule, Schedule):
        raise UsageError(
            f"run takes a schedule, got {schedule!r:.60}: build it first, "
            'e.g. build("ring", "all_reduce", world_size=4)'
        )
    return schedule


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


class _Rank:
    """One rank of `run`: what it claims before anything is moved, and its share of the schedule if all agree."""

    def __init__(
        self,
        given: object,
        rank: int,
        world_size: int,
        own: object,
        into: object,
        op: object,
        factor: float,
        deterministic: bool,
    ) -> None:
        self._share: _Share
        self._result: torch.Tensor | None = None
        self.cause: Exception | None = None
        try:
            schedule = _collective(given)
            name, factor = op_and_factor(op, factor)
            options = {"op": name, "factor": factor, "deterministic": deterministic}
            self._prepare(schedule, rank, world_size, own, into, options)
        except Exception as error:  # of any kind: the other ranks wait for this one's claim
            known = isinstance(error, UnisonoError)
            self.cause = None if known else error
            self.claim = Claim(refusal=f"{error}" if known else f"{type(error).__name__}: {error}")
            return
        self.claim = Claim(
            schedule=f"{schedule.name} {schedule.collective.name} {digest(schedule)}",
            tensor=f"{name_of_dtype(own.dtype)} {list(own.shape)}" if isinstance(own, torch.Tensor) else "None",
            op=name if schedule.collective.reduces else "",
            deterministic=str(deterministic),
        )

    def _prepare(
        self, schedule: Schedule, rank: int, world_size: int, own: object, into: object, options: dict[str, Any]
    ) -> None:
        """Checks the operands of this rank; new memory for the result, where there is one."""
        c = schedule.collective
        if c.name == "barrier":
            self._share = _ready(schedule, rank, world_size, None)
            return
        if not isinstance(own, torch.Tensor):
            raise UsageError(f"{schedule.name}: rank {rank} needs one tensor, got {type(own).__name__}")
        shape = _result_shape(c, list(own.shape))
        if c.name not in ("reduce", "gather") or rank == c.root:
            self._result = torch.empty(shape, dtype=own.dtype, device=own.device) if into is None else _one(into, rank)
        self._share = _ready(schedule, rank, world_size, own.contiguous(), self._result, **options)

    def go(self, transport: Transport) -> torch.Tensor | None:
        """Moves the data; what this rank ends up with."""
        self._share(transport)
        return self._result


def _one(into: object, rank: int) -> torch.Tensor:
    if not isinstance(into, torch.Tensor):
        raise UsageError(f"rank {rank} needs one tensor as its output, got {type(into).__name__}")
    return into


def _result_shape(c: Collective, shape: list[int]) -> list[int]:
    """The shape of a result for a rank's tensor; see the table of `run`."""
    n = c.world_size
    if c.name not in (*_SPLIT, *_JOINED, "all_to_all"):
        return shape
    if c.name in _JOINED:
        return [n * shape[0], *shape[1:]] if shape else [n]
    if not shape or shape[0] % n:
        raise UsageError(f"{c.name} over {n} ranks cuts the first dimension in {n}, which {shape} does not allow")
    return [shape[0] // n, *shape[1:]] if c.name in _SPLIT else shape


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

    Raises UsageError if the schedule does not fit the transport or the tensors, and what the transport raises. Ranks
    compare nothing: `run` does.
    """
    options: dict[str, Any] = {"op": op, "factor": factor, "sizes": sizes, "deterministic": deterministic}
    _ready(schedule, transport.rank, transport.world_size, tensor, output, **options)(transport)


def _ready(
    schedule: Schedule,
    rank: int,
    world_size: int,
    tensor: torch.Tensor | Tensors | None,
    output: torch.Tensor | Tensors | None = None,
    op: str = "SUM",
    factor: float = 1.0,
    sizes: Sequence[int] | None = None,
    deterministic: bool = False,
) -> _Share:
    """This rank's share of `run_over` once its arguments are checked; raises UsageError before anything is moved."""
    c = schedule.collective
    if c.world_size != world_size:
        raise UsageError(f"{schedule.name} {c.name} is made for {c.world_size} ranks, not for {world_size}")
    share = lower(schedule, rank, "messages", deterministic)
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
    _check_kinds(share, [*sources, *results])
    sources, combine = _arithmetic(c, sources, op, factor)
    return lambda transport: execute(share, transport, sources, results, sizes, combine)


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


def _check_kinds(share: Program, tensors: Tensors) -> None:
    """One dtype and one device for all that a rank gives and gets."""
    kinds = list(dict.fromkeys(f"{name_of_dtype(t.dtype)} on {t.device}" for t in tensors))
    if len(kinds) > 1:
        raise UsageError(
            f"{share.name}: the tensor and the output of rank {share.rank} are {' and '.join(kinds)}: give one dtype "
            "and device"
        )

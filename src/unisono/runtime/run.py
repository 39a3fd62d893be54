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
from unisono.runtime.reduce import op_and_factor, reducer
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
    tensor: torch.Tensor | None,
    transport: Transport,
    output: torch.Tensor | None = None,
    *,
    op: str = "SUM",
    factor: float = 1.0,
    deterministic: bool = False,
) -> None:
    """Runs this rank's share of a schedule over a transport: `run` without the comparison of what the ranks give.

    Every rank of the transport calls it with the same schedule and options. all_reduce, broadcast and reduce work on
    `tensor` in place (reduce changes the root's alone), or fill `output`. The others read `tensor` and fill `output`,
    with as many elements as in the table of `run`, or None for nothing. Tensors are contiguous and of one dtype, and do
    not overlap otherwise.

    Raises UsageError if the schedule does not fit the transport or the tensors, and what the transport raises.
    """
    options: dict[str, Any] = {"op": op, "factor": factor, "deterministic": deterministic}
    _ready(schedule, transport.rank, transport.world_size, tensor, output, **options)(transport)


def _ready(
    schedule: Schedule,
    rank: int,
    world_size: int,
    tensor: torch.Tensor | None,
    output: torch.Tensor | None = None,
    op: str = "SUM",
    factor: float = 1.0,
    deterministic: bool = False,
) -> _Share:
    """This rank's share of `run_over` once its arguments are checked; raises UsageError before anything is moved."""
    c = schedule.collective
    if c.world_size != world_size:
        raise UsageError(f"{schedule.name} {c.name} is made for {c.world_size} ranks, not for {world_size}")
    share = lower(schedule, rank, "messages", deterministic)
    if c.name == "barrier":
        tensor, op = torch.zeros(c.num_chunks, dtype=torch.uint8), "BOR"
        output = tensor
    if c.name in _IN_PLACE and output is None:
        output = tensor
    source, result = _flat(share, "tensor", tensor), _flat(share, "output", output)
    _check_alike(share, source, result)
    combine = None
    if c.reduces:
        assert source is not None  # every rank contributes
        combine = reducer(source.dtype, op, factor)
        if op == "PREMUL_SUM":  # a SUM of multiplied inputs
            source, combine = combine.prepared(source), reducer(combine.dtype, "SUM")
    return lambda transport: execute(share, transport, source, result, combine)


def _blocks(share: Program, what: str) -> int:
    """How many blocks this rank's operand has."""
    return len((share.blocks_in if what == "tensor" else share.blocks_out)[share.rank])


def _flat(share: Program, what: str, given: torch.Tensor | None) -> torch.Tensor | None:
    """An operand as a flat tensor of equal blocks, None where this rank has none."""
    if not (count := _blocks(share, what)):
        return None
    if given is None:
        raise UsageError(f"{share.name}: rank {share.rank} needs its {what}, got None")
    if not given.is_contiguous():
        raise UsageError(f"{share.name}: the {what} of rank {share.rank} is not contiguous; give {what}.contiguous()")
    if given.numel() % count:
        raise UsageError(
            f"{share.name}: the {what} of rank {share.rank} has {given.numel()} elements, not {count} equal blocks"
        )
    return given.detach().view(-1)


def _check_alike(share: Program, source: torch.Tensor | None, result: torch.Tensor | None) -> None:
    """Blocks of one size, one dtype and one device for what a rank gives and gets."""
    if source is None or result is None:
        return
    wanted = source.numel() // _blocks(share, "tensor") * _blocks(share, "output")
    if result.numel() != wanted:
        raise UsageError(
            f"{share.name}: the output of rank {share.rank} has {result.numel()} elements, expected {wanted}"
        )
    kinds = list(dict.fromkeys(f"{name_of_dtype(t.dtype)} on {t.device}" for t in (source, result)))
    if len(kinds) > 1:
        raise UsageError(
            f"{share.name}: the tensor and the output of rank {share.rank} are {' and '.join(kinds)}: give one dtype "
            "and device"
        )

"""Every operation: how it is called for a case, and what each of its tensors must hold afterwards."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from contract.seat import Seat
from contract.values import as_bytes

__all__ = ["MOVING", "OPERATIONS", "REDUCING", "ROOTED"]


def broadcast(seat: Seat) -> None:
    sent = seat.values(seat.root)
    mine = seat.give(seat.values(seat.me), becomes=sent)
    seat.call(dist.broadcast, mine, **seat.at_root("src"))


def all_reduce(seat: Seat) -> None:
    mine = seat.give(seat.values(seat.me), becomes=seat.reduced())
    seat.call(dist.all_reduce, mine, seat.op)


def reduce(seat: Seat) -> None:
    mine = seat.give(seat.values(seat.me), becomes=seat.reduced() if seat.me == seat.root else None)
    seat.call(dist.reduce, mine, op=seat.op, **seat.at_root("dst"))


def gather(seat: Seat) -> None:
    results = None
    if seat.me == seat.root:
        results = [seat.take(seat.values(member)) for member in range(seat.size)]
    seat.call(dist.gather, seat.give(seat.values(seat.me)), results, **seat.at_root("dst"))


def scatter(seat: Seat) -> None:
    inputs = None
    if seat.me == seat.root:
        inputs = [seat.give(seat.values(seat.root, part)) for part in range(seat.size)]
    seat.call(dist.scatter, seat.take(seat.values(seat.root, seat.me)), inputs, **seat.at_root("src"))


def all_gather(seat: Seat) -> None:
    """Form 1: every member contributes another number of rows, the first one none."""
    contributions = [seat.values(member, shape=_rows(seat, member)) for member in range(seat.size)]
    results = [seat.take(contribution) for contribution in contributions]
    seat.call(dist.all_gather, results, seat.give(contributions[seat.me]))


def all_gather_into_tensor(seat: Seat) -> None:
    """Form 1: the result is stacked instead of concatenated."""
    join = torch.stack if seat.case.form else torch.cat
    result = seat.take(_join(join, [seat.values(member) for member in range(seat.size)]))
    seat.call(dist.all_gather_into_tensor, result, seat.give(seat.values(seat.me)))


def reduce_scatter(seat: Seat) -> None:
    """Form 1: every member receives another number of rows, the first one none."""
    inputs = [seat.give(seat.values(seat.me, part, _rows(seat, part))) for part in range(seat.size)]
    result = seat.take(seat.reduced(seat.me, _rows(seat, seat.me)))
    seat.call(dist.reduce_scatter, result, inputs, seat.op)


def reduce_scatter_tensor(seat: Seat) -> None:
    """Form 1: the input is stacked instead of concatenated."""
    join = torch.stack if seat.case.form else torch.cat
    given = seat.give(_join(join, [seat.values(seat.me, part) for part in range(seat.size)]))
    seat.call(dist.reduce_scatter_tensor, seat.take(seat.reduced(seat.me)), given, seat.op)


def all_to_all(seat: Seat) -> None:
    """Form 1: every pair exchanges another number of rows, some none."""
    inputs = [seat.give(seat.values(seat.me, to, _pair(seat, seat.me, to))) for to in range(seat.size)]
    results = [seat.take(seat.values(frm, seat.me, _pair(seat, frm, seat.me))) for frm in range(seat.size)]
    seat.call(dist.all_to_all, results, inputs)


def all_to_all_single(seat: Seat) -> None:
    """Form 1: with split sizes, uneven, some zero."""
    inputs = [seat.values(seat.me, to, _pair(seat, seat.me, to)) for to in range(seat.size)]
    wanted = [seat.values(frm, seat.me, _pair(seat, frm, seat.me)) for frm in range(seat.size)]
    splits = [[len(x) for x in wanted], [len(x) for x in inputs]] if seat.case.form else []
    seat.call(dist.all_to_all_single, seat.take(_join(torch.cat, wanted)), seat.give(_join(torch.cat, inputs)), *splits)


def barrier(seat: Seat) -> None:
    seat.call(dist.barrier)


def _join(join: Callable[[list[torch.Tensor]], torch.Tensor], parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate or stack as bytes, for torch cannot concatenate every dtype."""
    if join is torch.cat and not parts[0].shape:
        parts = [part.view(1) for part in parts]
    return join([as_bytes(part) for part in parts]).view(parts[0].dtype).squeeze(-1)


def _rows(seat: Seat, member: int) -> tuple[int, ...]:
    shape = seat.case.shape
    return (shape[0] * member // 2, *shape[1:]) if seat.case.form and shape else shape


def _pair(seat: Seat, sender: int, receiver: int) -> tuple[int, ...]:
    shape = seat.case.shape
    return (shape[0] * ((sender + 2 * receiver) % 3), *shape[1:]) if seat.case.form and shape else shape


OPERATIONS: dict[str, Callable[[Seat], None]] = {
    function.__name__: function
    for function in (
        broadcast,
        all_reduce,
        reduce,
        gather,
        scatter,
        all_gather,
        all_gather_into_tensor,
        reduce_scatter,
        reduce_scatter_tensor,
        all_to_all,
        all_to_all_single,
        barrier,
    )
}
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
MOVING = tuple(name for name in OPERATIONS if name not in (*REDUCING, "barrier"))

"""The methods of the group itself, in every form that torch's own groups have, positional and by name."""

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from contract.test_refusals import messages
from ranks import ranks

MAX, LONG = dist.ReduceOp.MAX, timedelta(seconds=20)


def group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def mine(rank: int) -> torch.Tensor:
    """Two rows: a form that takes a tensor for a list would see them one by one."""
    return torch.tensor([[1.0], [2.0]]) + 10 * rank


def in_place(rank: int, world_size: int) -> dict[str, list[float]]:
    """What a call on one tensor leaves in it, by form."""
    g = group()
    forms: dict[str, Callable[[torch.Tensor], dist.Work]] = {
        "sum": lambda t: g.allreduce(t),
        "sum of a list": lambda t: g.allreduce([t]),
        "sum of a tuple": lambda t: g.allreduce((t,)),
        "max": lambda t: g.allreduce(t, MAX),
        "max of a list": lambda t: g.allreduce([t], MAX, LONG),
        "max by name": lambda t: g.allreduce(t, op=MAX, timeout=LONG),
        "broadcast": lambda t: g.broadcast(t, 1),
        "broadcast by name": lambda t: g.broadcast(t, root=1, timeout=LONG),
        "reduce": lambda t: g.reduce(t, 1),
        "reduce by name": lambda t: g.reduce(t, root=1, op=MAX, timeout=LONG),
    }
    seen = {}
    for name, form in forms.items():
        tensor = mine(rank)
        form(tensor).wait()
        seen[name] = tensor.flatten().tolist()
    return seen


def by_lists(rank: int, world_size: int) -> dict[str, list[list[float]]]:
    """What a call leaves in its outputs, by form."""
    g, n = group(), world_size
    inputs = [mine(rank) + 100 * r for r in range(n)]
    sent, root = (inputs if rank == 1 else []), rank == 1
    seen = {}

    def outputs(count: int = n) -> list[torch.Tensor]:
        return [torch.zeros(2, 1) for _ in range(count)]

    def note(name: str, call: Callable[[list[torch.Tensor]], dist.Work], count: int = n) -> None:
        filled = outputs(count)
        call(filled).wait()
        seen[name] = [t.flatten().tolist() for t in filled]

    note("all_gather", lambda o: g.allgather(o, mine(rank)))
    note("all_gather in time", lambda o: g.allgather(o, mine(rank), LONG))
    note("all_gather of lists", lambda o: g.allgather([o], [mine(rank)]))
    note("gather", lambda o: g.gather(o if root else [], mine(rank), 1))
    note("gather by name", lambda o: g.gather(o if root else [], mine(rank), root=1))
    note("scatter", lambda o: g.scatter(o[0], sent, 1), 1)
    note("scatter by name", lambda o: g.scatter(o[0], sent, root=1, timeout=LONG), 1)
    note("reduce_scatter", lambda o: g.reduce_scatter(o[0], inputs), 1)
    note("reduce_scatter by name", lambda o: g.reduce_scatter(o[0], inputs, op=MAX), 1)
    note("all_to_all", lambda o: g.alltoall(o, inputs))
    g.barrier(LONG).wait()
    g.barrier(timeout=LONG).wait()
    return seen


def several(rank: int, world_size: int) -> dict[str, str]:
    """Rank 0 gives two tensors, or none, where a rank has one."""
    g = group()
    x, two, none = torch.ones(2), [torch.ones(2), torch.ones(2)], []
    outs = [[torch.zeros(2) for _ in range(world_size)] for _ in range(2)]
    many = rank == 0
    return messages(
        {
            "all_reduce": lambda: g.allreduce(two if many else [x]).wait(),
            "all_reduce of none": lambda: g.allreduce(none if many else [x]).wait(),
            "broadcast": lambda: g.broadcast(two if many else [x], 0).wait(),
            "all_gather": lambda: g.allgather(outs if many else outs[:1], two if many else [x]).wait(),
            "all_gather into none": lambda: g.allgather([] if many else outs[:1], [x]).wait(),
            "reduce_scatter": lambda: g.reduce_scatter(two if many else [x], [two]).wait(),
        }
    )


def messages_of_several(rank: int, world_size: int) -> list[str]:
    said = []
    for method in (group().send, group().recv):
        with pytest.raises(RuntimeError, match="2 tensors where a rank has one") as caught:
            method([torch.ones(1), torch.ones(1)], 1 - rank, 0)
        said.append(type(caught.value).__name__)
    return said


def test_forms_of_calls_in_place() -> None:
    for rank, seen in enumerate(ranks(2).run(in_place)):
        total, most = [12.0, 14.0], [11.0, 12.0]
        unchanged = mine(0).flatten().tolist()
        assert seen == {
            "sum": total,
            "sum of a list": total,
            "sum of a tuple": total,
            "max": most,
            "max of a list": most,
            "max by name": most,
            "broadcast": most,
            "broadcast by name": most,
            "reduce": total if rank == 1 else unchanged,
            "reduce by name": most if rank == 1 else unchanged,
        }


def test_forms_of_calls_with_lists() -> None:
    for rank, seen in enumerate(ranks(2).run(by_lists)):
        everybody = [[1.0, 2.0], [11.0, 12.0]]
        nothing = [[0.0, 0.0]] * 2
        more = 100.0 * rank
        assert {name: value for name, value in seen.items() if name.startswith("all_gather")} == {
            "all_gather": everybody,
            "all_gather in time": everybody,
            "all_gather of lists": everybody,
        }
        assert seen["gather"] == seen["gather by name"] == (everybody if rank == 1 else nothing)
        assert seen["scatter"] == seen["scatter by name"] == [[11 + more, 12 + more]]
        assert seen["reduce_scatter"] == [[12 + 2 * more, 14 + 2 * more]]
        assert seen["reduce_scatter by name"] == [[11 + more, 12 + more]]
        assert seen["all_to_all"] == [[1 + more, 2 + more], [11 + more, 12 + more]]


def test_several_tensors_are_refused_on_all_ranks() -> None:
    first, second = ranks(2, group_timeout=10).run(several)
    for name, text in first.items():
        assert text.startswith("UsageError"), f"{name}: {text}"
        assert second[name].startswith(("UsageError", "MismatchError")), f"{name}: {second[name]}"
    assert "2 tensors where a rank has one" in second["all_reduce"]


def test_messages_of_several_tensors_are_refused() -> None:
    assert ranks(2).run(messages_of_several) == [["UsageError"] * 2] * 2

"""Objects that can not be pickled, or unpickled: the error says which, of which rank and why; the group goes on."""

import datetime
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hangs.job import Fault, Job, attempt
from ranks import ranks


class Stubborn:
    """Says itself why it can not be pickled."""

    def __reduce__(self) -> Any:
        raise RuntimeError("an open file of mine")


def absent() -> None:
    raise ValueError("no such file on this rank")


class Absent:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> Any:
        return absent, ()


def all_gather(rank: int, bad: int, spoilt: Any, group: Any) -> list[Any]:
    objects: list[Any] = ["before"] * 3
    dist.all_gather_object(objects, spoilt if rank == bad else {"fine": [1, 2]}, group=group)
    return objects


def gather(rank: int, bad: int, spoilt: Any, group: Any) -> list[Any]:
    objects: list[Any] = ["before"] * 3
    dist.gather_object(spoilt if rank == bad else {"fine": [1, 2]}, objects if rank == 1 else None, 1, group)
    return objects


def broadcast(rank: int, bad: int, spoilt: Any, group: Any) -> list[Any]:
    objects = [1, spoilt] if rank == bad else ["before"] * 2
    dist.broadcast_object_list(objects, bad, group=group)
    return objects


def scatter(rank: int, bad: int, spoilt: Any, group: Any) -> list[Any]:
    objects: list[Any] = ["before"]
    dist.scatter_object_list(objects, [1, spoilt, 3] if rank == bad else None, src=bad, group=group)
    return objects


def send(rank: int, bad: int, spoilt: Any, group: Any) -> list[Any]:
    objects = ["before", "before"]
    if rank == bad:
        dist.send_object_list([1, spoilt], 0, group)
    elif rank == 0:
        dist.recv_object_list(objects, bad, group=group)
    return objects


KINDS: dict[Callable[[int, int, Any, Any], list[Any]], tuple[str, str, set[int]]] = {
    all_gather: ("all_gather_object", "the object", {0, 1, 2}),
    gather: ("gather_object", "the object", {1}),
    broadcast: ("broadcast_object_list", "the object no. 1", {0, 1}),
    scatter: ("scatter_object_list", "the object no. 1", {1}),
    send: ("(send|recv)_object_list", "the object no. 1", {0}),
}
"""With the call, the words for the object of rank 2, and the ranks that receive it."""


def walk(rank: int, world_size: int, spoilt: type) -> list[list[tuple[Fault, float, str]]]:
    """Each kind with a bad object on rank 2, in the default group and in another; then what still works."""
    told, other = [], dist.new_group([0, 1, 2])
    for group in (None, other):
        found = []
        for kind in KINDS:
            kept: list[Any] = [None] * 3
            fault = attempt(lambda kind=kind, group=group: kind(rank, 2, spoilt(), group))
            x = torch.ones(3)
            dist.all_reduce(x, group=group)
            dist.all_gather_object(kept, rank, group)
            found.append((fault, float(x.sum()), str(kept)))
        told.append(found)
    dist.destroy_process_group(other)
    return told


def test_every_rank_reads_which_object_it_was_and_the_group_goes_on() -> None:
    for rank, groups in enumerate(ranks(3).run(walk, Stubborn)):
        for found in groups:
            for (op, what, _), (fault, total, after) in zip(KINDS.values(), found, strict=True):
                if rank == 1 and "send" in op:  # no part of it
                    fault.says("")
                else:
                    fault.says(
                        "UsageError", f"^{op}: {what} of rank 2 can not be pickled: RuntimeError: an open file of"
                    )
                    fault.says("UsageError", "group can still be used")
                    assert fault.seconds < 1.0
                assert (total, after) == (9.0, "[0, 1, 2]")


def test_who_receives_what_can_not_be_unpickled_reads_whose_it_is_and_the_group_goes_on() -> None:
    for rank, groups in enumerate(ranks(3).run(walk, Absent)):
        for found in groups:
            for (op, what, receivers), (fault, total, after) in zip(KINDS.values(), found, strict=True):
                words = f"{what} of rank 2 can not be unpickled on rank {rank}: ValueError: no such file on this rank"
                expected = (
                    ("UsageError", f"^{op}: {words}. .*the group can still be used$") if rank in receivers else ("",)
                )
                fault.says(*expected)
                assert (total, after) == (9.0, "[0, 1, 2]")


def two_failures(rank: int, world_size: int) -> Fault:
    return attempt(lambda: dist.all_gather_object([None] * 3, (lambda: 1) if rank else 0))


def test_all_who_failed_are_named() -> None:
    for fault in ranks(3).run(two_failures):
        fault.says("UsageError", "the object of rank 1 can not .*<lambda>.*; the object of rank 2 can not .*<lambda>")


def right(rank: int, world_size: int) -> list[Any]:
    """What can be pickled arrives as it is, whatever it is; nothing but the results is written."""
    when = datetime.timedelta(seconds=rank)
    gathered: list[Any] = [None] * 3
    dist.all_gather_object(gathered, (rank, when, torch.full((2,), rank), walk))
    assert gathered[2][3] is walk
    collected: list[Any] | None = [None] * 3 if rank == 1 else None
    dist.gather_object({rank: when}, collected, dst=1)
    sent = ["a", None, when] if rank == 0 else [0, 0, 0]
    dist.broadcast_object_list(sent)
    scattered: list[Any] = [None, "kept"]
    dist.scatter_object_list(scattered, [["x"], ["y"], ["z"]] if rank == 2 else None, group_src=2)
    last: list[Any] = [None]
    if rank == 0:
        dist.send_object_list([pickle.PicklingError("as an object")], 2)
    elif rank == 2:
        assert dist.recv_object_list(last, 0) == 0
    return [gathered[1][:2], gathered[2][2].tolist(), collected, sent[1:], scattered, repr(last[0])]


def test_right_objects_arrive_unchanged() -> None:
    def time(seconds: int) -> datetime.timedelta:
        return datetime.timedelta(seconds=seconds)

    results = ranks(3).run(right)
    for rank, (pair, tensor, collected, sent, scattered, last) in enumerate(results):
        assert pair == (1, time(1))
        assert tensor == [2, 2]
        assert collected == ([{r: time(r)} for r in range(3)] if rank == 1 else None)
        assert sent == [None, time(0)]
        assert scattered == [["xyz"[rank]], "kept"]
        assert last == ("PicklingError('as an object')" if rank == 2 else "None")


def uncaught(rank: int, world_size: int) -> Fault:
    dist.barrier()
    if rank == 1:
        dist.all_gather_object([None] * 3, lambda: 1)
    return attempt(lambda: dist.all_gather_object([None] * 3, rank))


def test_uncaught_on_one_rank_it_is_still_read_by_all() -> None:
    with Job(uncaught, 3) as job:
        first, _, third = job.results(10)
    for fault in (first, third):
        fault.says("UsageError", "the object of rank 1 can not be pickled", "lambda")


def elsewhere(rank: int, world_size: int) -> str:
    objects: list[Any] = [None] * 2
    dist.all_gather_object(objects, rank)
    return f"{objects} {attempt(lambda: dist.all_gather_object(objects, lambda: 1)).kind}"


def test_groups_of_other_backends_are_left_to_torch() -> None:
    assert ranks(2, backend="gloo").run(elsewhere) in (["[0, 1] AttributeError"] * 2, ["[0, 1] PicklingError"] * 2)


@pytest.mark.parametrize("name", [op for op, *_ in KINDS.values() if "(" not in op])
def test_torchs_functions_keep_their_names_and_texts(name: str) -> None:
    function = getattr(dist, name)
    assert function is getattr(dist.distributed_c10d, name)
    assert (function.__name__, function.__module__) == (name, "torch.distributed.distributed_c10d")
    assert function.__doc__ == function.__wrapped__.__doc__

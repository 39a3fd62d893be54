import pytest

from unisono.algorithms import AlgorithmInfo, build, list_algorithms
from unisono.schedule import Step, Transfer
from unisono.schedule.progress import busiest_sender, find_deadlock


def _steps(name: str, collective: str, n: int) -> list[Step]:
    return list(build(name, collective, n).explicit_steps())


def test_ring_of_senders_who_wait_for_their_receivers() -> None:
    cycle = find_deadlock(_steps("ring", "all_reduce", 3), in_flight=0)
    assert [str(wait) for wait in cycle] == [
        "rank 0 in step 0, sending to 1, waits for rank 1",
        "rank 1 in step 0, sending to 2, waits for rank 2",
        "rank 2 in step 0, sending to 0, waits for rank 0",
    ]
    assert find_deadlock(_steps("ring", "all_reduce", 3), in_flight=1) == []


def test_trees_and_chains_need_no_message_under_way() -> None:
    for name in ("tree", "chain", "star"):
        assert find_deadlock(_steps(name, "all_reduce", 7), in_flight=0) == []


def test_everybody_to_everybody_needs_room_for_all_but_one_message() -> None:
    steps = _steps("direct", "all_to_all", 4)
    assert busiest_sender(steps) == 3
    assert [bool(find_deadlock(steps, k)) for k in range(4)] == [True, True, True, False]


def test_transfers_to_one_peer_are_one_message() -> None:
    step = Step.of(*(Transfer(a, 1 - a, c, 1, True) for a in (0, 1) for c in range(0, 8, 2)))
    assert busiest_sender([step]) == 1
    assert find_deadlock([step], in_flight=1) == []
    assert busiest_sender([]) == busiest_sender([Step.of()]) == 0


@pytest.mark.parametrize("algorithm", list_algorithms(), ids=lambda e: f"{e.name}-{e.collective}")
def test_as_many_as_the_busiest_sender_sends_is_always_enough(algorithm: AlgorithmInfo) -> None:
    for n in (2, 5, 8):
        steps = list(build(algorithm.name, algorithm.collective, n, chunks=2).explicit_steps())
        assert find_deadlock(steps, busiest_sender(steps)) == []


def test_waits_lead_around_even_when_the_first_is_outside_the_cycle() -> None:
    swap, late = Step.of(Transfer(1, 2, 0), Transfer(2, 1, 0)), Step.of(Transfer(1, 0, 0))
    assert [wait.rank for wait in find_deadlock([swap, late], in_flight=0)] == [1, 2]

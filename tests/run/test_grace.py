"""When the worker takes up what its caller has left."""

from unisono.run.grace import Grace


def test_what_nobody_comes_back_for_is_taken_up_after_the_shortest_time() -> None:
    grace = Grace()
    shortest = grace.seconds
    assert grace.over(idle=False, visited=False)
    assert (grace.seconds, grace.rests) == (shortest, False)


def test_callers_who_carry_their_calls_are_left_alone_for_longer_until_one_does_not() -> None:
    grace = Grace()
    slept = []
    while not grace.rests:
        slept.append(grace.seconds)
        assert not grace.over(idle=True, visited=True)
    assert slept == [0.0003, 0.0006, 0.0012, 0.0024, 0.0048, 0.005]
    assert not grace.over(idle=False, visited=True)
    assert (grace.seconds, grace.rests) == (0.005, False)
    assert grace.over(idle=False, visited=False)
    assert grace.seconds == 0.0003


def test_a_caller_who_comes_for_something_else_does_not_put_off_a_call_for_ever() -> None:
    grace = Grace()
    assert [grace.over(idle=False, visited=True) for _ in range(10)] == [False] * 8 + [True, False]
    assert not grace.over(idle=True, visited=False)
    assert [grace.over(idle=False, visited=True) for _ in range(9)] == [False] * 8 + [True]

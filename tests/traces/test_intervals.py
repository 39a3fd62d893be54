import random

from unisono.trace.intervals import Interval, clipped, common, length, minus, union


def moments(intervals: list[Interval]) -> set[int]:
    return {moment for begin, end in intervals for moment in range(begin, end)}


def test_the_same_as_sets_of_moments() -> None:
    generator = random.Random(0)
    for _ in range(300):
        a, b = ([(x, x + generator.randint(0, 9)) for x in generator.choices(range(60), k=8)] for _ in range(2))
        assert moments(union(a)) == moments(a)
        assert moments(minus(a, b)) == moments(a) - moments(b)
        assert moments(common(a, b)) == moments(a) & moments(b)
        assert length(union(a)) == len(moments(a))
        assert length(minus(a, b)) == len(moments(a) - moments(b))
        assert moments(clipped(a, (10, 30))) == moments(a) & set(range(10, 30))
        assert all(one[1] < other[0] for one, other in zip(union(a), union(a)[1:], strict=False))

import pytest

from unisono.errors import UsageError
from unisono.parallel.mesh import ParallelDims

MODEL = {"layers": 4, "heads": 4, "context": 16, "vocabulary": 19}


def test_places_count_tp_fastest_and_pp_slowest() -> None:
    shape = ParallelDims(dp=2, tp=2, pp=2)
    assert shape.place(5) == {"pp": 1, "dp": 0, "sp": 0, "tp": 1}
    found = [tuple(ParallelDims(dp=2, tp=3, pp=2, sp=2).place(rank).values()) for rank in range(24)]
    assert found == sorted(set(found))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (ParallelDims(dp=3, tp=2), "dp · tp · pp · sp = 3 · 2 · 1 · 1 has 6 ranks, not 8"),
        (ParallelDims(dp=8, tp=0), "tp = 0, expected 1 or more"),
        (ParallelDims(pp=-2, dp=-4), "dp = -4, expected 1 or more"),
    ],
)
def test_ranks_that_do_not_factor(shape: ParallelDims, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        shape.check(8)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (ParallelDims(pp=8), "8 stages for 4 layers"),
        (ParallelDims(tp=3), "4 attention heads do not divide by tp = 3"),
        (ParallelDims(sp=9), "a context of 16 positions makes no 18 pieces"),
        (ParallelDims(tp=20), "20"),
    ],
)
def test_a_model_that_cannot_be_split(shape: ParallelDims, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        shape.check_model(**MODEL)
    ParallelDims(dp=9, tp=4, pp=4, sp=8).check_model(**MODEL)


def test_microbatches_are_two_per_stage_unless_told() -> None:
    assert [ParallelDims(dp=2, pp=pp).usual_microbatches for pp in (1, 2, 4)] == [1, 4, 8]


def test_a_small_vocabulary_and_stages_per_rank() -> None:
    with pytest.raises(UsageError, match="a vocabulary of 3 cannot be split over tp = 4"):
        ParallelDims(tp=4).check_model(**MODEL | {"vocabulary": 3})
    with pytest.raises(UsageError, match="8 stages for 4 layers"):
        ParallelDims(pp=4).check_model(**MODEL, stages_per_rank=2)


def test_a_batch_that_does_not_fill_the_mesh() -> None:
    ParallelDims(dp=2).check_batch(8, 4)
    with pytest.raises(UsageError, match="a batch of 7 sequences does not fill 4 microbatches on each of dp = 2"):
        ParallelDims(dp=2).check_batch(7, 4)
    with pytest.raises(UsageError, match="0 microbatches"):
        ParallelDims().check_batch(7, 0)

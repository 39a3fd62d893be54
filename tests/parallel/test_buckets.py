import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from unisono.errors import UsageError
from unisono.parallel.data.buckets import GradientBucket, check_dense, plan_buckets, shaped

DTYPES = (torch.float32, torch.float64)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
    st.integers(1, 400),
    st.integers(1, 400),
)
def test_a_plan_holds_each_parameter_once_in_order_and_no_dtype_is_mixed(kinds, random, nbytes, first) -> None:
    tensors = [torch.empty(size, dtype=dtype) for size, dtype in kinds]
    order = list(range(len(tensors)))
    random.shuffle(order)
    plan = plan_buckets(tensors, order, nbytes, first)
    assert sorted(slot for bucket in plan for slot in bucket) == sorted(order)
    for dtype in DTYPES:
        of_dtype = [bucket for bucket in plan if tensors[bucket[0]].dtype == dtype]
        assert [slot for bucket in of_dtype for slot in bucket] == [s for s in order if tensors[s].dtype == dtype]
    for number, bucket in enumerate(plan):
        limit = nbytes if number else first
        assert len({tensors[slot].dtype for slot in bucket}) == 1
        assert sum(tensors[slot].nbytes for slot in bucket[:-1]) < max(limit, first)


def test_a_plan_by_hand() -> None:
    weights = [torch.empty(n) for n in (10, 1, 2, 3)]
    assert plan_buckets(weights, [3, 2, 1, 0], 16, 12) == [[3], [2, 1, 0]]
    assert plan_buckets(weights, [3, 2, 1, 0], 12, 12) == [[3], [2, 1], [0]]
    assert plan_buckets(weights, [0, 1, 2, 3], 1000, 1) == [[0], [1, 2, 3]]
    with pytest.raises(UsageError, match="bucket of 0 bytes"):
        plan_buckets(weights, [0], 0, 5)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 3, 4, 5), (1, 3, 1, 1)])
def test_a_view_keeps_the_order_of_dims_in_memory(shape: tuple[int, ...]) -> None:
    like = torch.randn(shape)
    layouts = [like, like.t()] if len(shape) == 2 else [like]
    if len(shape) == 4:
        layouts.append(like.to(memory_format=torch.channels_last))
    for weight in layouts:
        flat = torch.arange(float(weight.numel()))
        view = shaped(flat, weight)
        assert view.shape == weight.shape
        if 1 not in shape:
            assert view.stride() == weight.stride()
        assert view.numel() == 0 or view.data_ptr() == flat.data_ptr()


def test_a_bucket_takes_gradients_and_hands_out_views_of_itself() -> None:
    weights = [Parameter(torch.ones(2, 3)), Parameter(torch.ones(4))]
    bucket = GradientBucket([1, 0], weights, None)
    weights[0].grad = torch.arange(6.0).view(2, 3)
    bucket.take(0)
    bucket.take(1)
    assert bucket.flat[:-2].tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 4, 5]
    assert weights[0].grad is bucket.views[0]
    assert weights[1].grad is None
    weights[0].grad += 1
    bucket.take(0)
    assert bucket.flat[4:-2].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_sparse_gradient_is_refused() -> None:
    with pytest.raises(UsageError, match=r"layout torch.sparse_coo.*sparse=False"):
        check_dense(torch.eye(3).to_sparse())

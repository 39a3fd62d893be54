"""PyTorch's own distributed test suite passes on unisono wherever it passes on Gloo.

`expected_3.txt` and `expected_4.txt` name the tests that must pass at 3 and 4 ranks: everything Gloo passes but
`CANNOT` (suite.py), and the all-to-all tests on lists of uneven tensors, which Gloo refuses. To see what Gloo does:
`python tests/torch_suite/driver.py --backend gloo --world-size 3`.
"""

import pytest
import torch.distributed as dist

from ranks import RankFailure, ranks
from torch_suite.suite import HERE, Suite


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", [3, 4])
def test_passes_what_gloo_passes(suites: dict[int, Suite], world_size: int) -> None:
    outcomes = suites[world_size].outcomes()
    expected = set((HERE / f"expected_{world_size}.txt").read_text().split())
    missing = expected - outcomes["passed"]
    assert not missing, f"{sorted(missing)} did not pass:\n{suites[world_size].err.read_text()[-20000:]}"


def call_monitored_barrier(rank: int, world_size: int) -> None:
    dist.monitored_barrier()


def test_monitored_barrier_is_still_refused_by_name() -> None:
    with pytest.raises(RankFailure, match="only implemented for GLOO"):
        ranks(2).run(call_monitored_barrier)

"""PyTorch's own distributed test suite passes on unisono wherever it passes on Gloo.

`expected_3.txt` and `expected_4.txt` name the tests that must pass at 3 and 4 ranks: everything Gloo passes but
`CANNOT` (suite.py), and the all-to-all tests on lists of uneven tensors, which Gloo refuses. To see what Gloo does:
`python tests/torch_suite/driver.py --backend gloo --world-size 3`.
"""

import pytest
import torch.distributed as dist

from ranks import HOSTS, RankFailure, ranks
from torch_suite.suite import RUNS, Suite, expected

ON_FOUR = pytest.param("4 ranks", marks=[] if HOSTS > 1 else pytest.mark.soak)  # the same tests, on two by two hosts


@pytest.mark.timeout(300)
@pytest.mark.parametrize("run", ["3 ranks", "what takes 4 ranks", ON_FOUR])
def test_passes_what_gloo_passes(suites: dict[str, Suite], run: str) -> None:
    world_size, only = RUNS[run]
    missing = (only or expected(world_size)) - suites[run].outcomes()["passed"]
    assert not missing, f"{sorted(missing)} did not pass:\n{suites[run].err.read_text()[-20000:]}"


def call_monitored_barrier(rank: int, world_size: int) -> None:
    dist.monitored_barrier()


def test_monitored_barrier_is_still_refused_by_name() -> None:
    with pytest.raises(RankFailure, match="only implemented for GLOO"):
        ranks(2).run(call_monitored_barrier)

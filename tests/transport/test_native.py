"""What compiled loops do to memory, against NumPy."""

import numpy as np
import pytest

pytest.importorskip("numba", reason="compiled loops need numba")

from unisono.transport.native import copy

EDGES = (0, 1, 255, 256, 4095, 4096, 4097, 4096 + 255, 8192, 65536 + 3, 1 << 20)


@pytest.mark.parametrize("nbytes", EDGES)
@pytest.mark.parametrize(("to", "source"), [(0, 0), (1, 0), (0, 3), (64, 16)])
def test_copy_moves_these_bytes_and_no_others(nbytes: int, to: int, source: int) -> None:
    rng = np.random.default_rng(nbytes)
    given, target = (rng.integers(0, 256, nbytes + 200, np.uint8) for _ in range(2))
    expected = target.copy()
    expected[to : to + nbytes] = given[source : source + nbytes]
    copy(target.ctypes.data + to, given.ctypes.data + source, nbytes)
    assert np.array_equal(target, expected)


def test_nothing_is_copied_where_there_is_less_than_nothing() -> None:
    given, target = np.ones(16, np.uint8), np.zeros(16, np.uint8)
    copy(target.ctypes.data, given.ctypes.data, -8)
    assert not target.any()

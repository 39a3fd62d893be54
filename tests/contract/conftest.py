"""Runs the contract at every world size, one world size after the other, so that each default group starts once."""

import pytest

WORLD_SIZES = (1, 2, 3, 4, 5, 8)


@pytest.fixture(scope="session", params=WORLD_SIZES, ids=lambda n: f"{n}-ranks")
def world_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)

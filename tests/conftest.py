"""What every test shares: one thread per process, and the pool of rank processes ended with the session."""

import gc
import os
import signal
from collections.abc import Iterator

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the ranks that are forked later
# torch's stores ask the resolver for the name of each address; a packet that is lost would cost 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
if os.environ.get("UNISONO_TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # CPU tensors are what is tested; torch turns to a GPU where it sees one

import pytest
from hypothesis import settings

from ranks import _POOL

# An example may wait for a busy machine, or be the first to import; every run of the tests draws the same ones.
settings.register_profile("unisono", deadline=None, derandomize=True)
settings.load_profile("unisono")

# A shell starts background jobs with Ctrl-C ignored, which processes inherit; what the tests start must not.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all modules and tests are there, which live as long as pytest


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _end_rank_processes() -> Iterator[None]:
    yield
    _POOL.close()

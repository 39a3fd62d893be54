"""Options of groups, and what the environment says."""

import os

import pytest
import torch
import torch.distributed as dist

import unisono
from ranks import ranks
from unisono.backend.options import from_environment, pinned
from unisono.errors import UsageError


def cores_of_pinned_ranks(rank: int, world_size: int, path: str, by_option: bool) -> tuple[list[int], int, float]:
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    torch.set_num_threads(64)
    try:
        if not by_option:
            os.environ["UNISONO_PIN"] = "1"
        choice = unisono.Options(pin=True) if by_option else None
        dist.init_process_group("unisono", f"file://{path}", rank=rank, world_size=world_size, pg_options=choice)
        x = torch.ones(3)
        dist.all_reduce(x)
        dist.destroy_process_group()
        return sorted(os.sched_getaffinity(0)), torch.get_num_threads(), x.sum().item()
    finally:
        os.environ.pop("UNISONO_PIN", None)
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def test_ranks_that_fit_keep_to_cores_of_their_own(tmp_path) -> None:
    free = sorted(os.sched_getaffinity(0))
    share = len(free) // 2 if len(free) == os.cpu_count() else 0
    for by_option in (True, False):
        found = ranks(2, group=False).run(cores_of_pinned_ranks, str(tmp_path / str(by_option)), by_option)
        expected = [free[:share], free[share : 2 * share]] if share else [free, free]
        assert found == [(cores, share or 64, 6.0) for cores in expected]


def test_more_ranks_than_cores_are_not_pinned(tmp_path) -> None:
    many = len(os.sched_getaffinity(0)) + 1
    found = ranks(many, group=False).run(cores_of_pinned_ranks, str(tmp_path / "meeting"), True)
    assert found == [(sorted(os.sched_getaffinity(0)), 64, 3.0 * many)] * many


@pytest.mark.parametrize("text", ["rong", "all_reduce=rong"])
def test_a_wrong_algorithm_of_the_environment_is_refused_by_the_variable(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("UNISONO_ALGORITHM", text)
    with pytest.raises(UsageError, match=f"UNISONO_ALGORITHM is '{text}': .*'?rong'?"):
        from_environment()


@pytest.mark.parametrize("name", ["UNISONO_PIN", "UNISONO_DETERMINISTIC"])
def test_a_switch_is_0_or_1(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("UNISONO_ALGORITHM", "ring")

    def both() -> tuple[bool, bool]:
        told = from_environment()
        assert told is not None
        return pinned(None), told.deterministic

    for text, on in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv(name, text)
        assert both() == (on and name == "UNISONO_PIN", on and name == "UNISONO_DETERMINISTIC")
    monkeypatch.setenv(name, "banana")
    with pytest.raises(UsageError, match=f"^{name} is 'banana', expected 0 or 1$"):
        both()

"""What torch's functions do for groups with GPUs, as far as it is decided without one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from unisono.backend import device_patches
from unisono.errors import UsageError

FORMS = {"timeout": None, "pg_options": None, "group_desc": "parts"}


class Parent(SimpleNamespace):
    """A group of 4 of whom this process is group rank ``here``."""

    def rank(self) -> int:
        return int(self.here)

    def size(self) -> int:
        return 4


def split(monkeypatch: pytest.MonkeyPatch, here: int, parts: Any, everyone: bool = False) -> tuple[Any, list[Any]]:
    """What `split_group` gives, and the ranks it makes groups of; global ranks are ten more than the parent's."""
    asked: list[list[int]] = []

    def new_group(ranks: list[int], *given: Any, use_local_synchronization: bool, group_desc: str) -> str:
        assert given == (None, "cpu:unisono,cuda:nccl", None)
        assert (use_local_synchronization, group_desc) == (not everyone, "parts")
        asked.append(ranks)
        return f"group of {ranks}"

    parent = Parent(here=here)
    monkeypatch.setattr(device_patches, "_ours", lambda group: group)
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank + 10)
    monkeypatch.setattr(dist, "get_backend", lambda group: "cpu:unisono,cuda:nccl")
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=parent if everyone else None))
    found = device_patches._split(lambda **_: None, parent_pg=parent, split_ranks=parts, **FORMS)
    return found, asked


def test_a_part_is_a_new_group_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert split(monkeypatch, 2, [[0, 1], [3, 2]]) == ("group of [12, 13]", [[12, 13]])
    assert split(monkeypatch, 2, [[0, 1], [3, 2]], everyone=True) == ("group of [12, 13]", [[10, 11], [12, 13]])
    assert split(monkeypatch, 2, [[0, 1]]) == (None, [])
    assert split(monkeypatch, 2, [[0, 1]], everyone=True) == (None, [[10, 11]])


@pytest.mark.parametrize("parts", [None, [], [[]], [[0, 1], [1, 2]], [[0, 4]], [[-1]]])
def test_parts_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch, parts: Any) -> None:
    with pytest.raises(UsageError, match="split_ranks"):
        split(monkeypatch, 0, parts)


def test_other_groups_go_through_torch_s_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_patches, "_ours", lambda group: None)
    assert device_patches._split(lambda **asked: asked, parent_pg=None, split_ranks=[[0]]) == {
        "parent_pg": None, "split_ranks": [[0]]
    }  # fmt: skip
    assert device_patches._batch(lambda ops: ("torch's", ops), []) == ("torch's", [])

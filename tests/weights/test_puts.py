"""Sources put what they send into memory that targets expose, in one pass; targets sum what has landed behind that."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unisono import weights
from unisono.errors import CorruptionError, UpdateError
from unisono.weights.packing import Packer
from unisono.weights.published import places_of
from unisono.weights.source import Source
from weights.live import blank, fill, forked_with, replica, trainer, wrong

Pair = tuple[weights.Sender, weights.Receiver]


@pytest.fixture(params=[1, 8], ids=["one core", "a core each"])
def puts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """On one core, which a sender and a replica outnumber, and on more; has the number of each put's windows."""
    found: list[int] = []
    put = Source._put

    def noted(self: Source, *given: Any) -> None:
        put(self, *given)
        found.append(len(self.windows))

    monkeypatch.setattr(Source, "_put", noted)
    monkeypatch.setattr(os, "cpu_count", lambda: request.param)
    return found


@pytest.fixture
def meet(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    """A sender of tensors and a replica of others."""
    made: list[Any] = []

    def meet(source: Any, into: Any, **given: Any) -> Pair:
        made.extend((trainer(str(tmp_path), source, **given), replica(str(tmp_path), into)))
        return made[0], made[1]

    yield meet
    for each in reversed(made):
        each.close()


def push(pair: Pair) -> None:
    sender, receiver = pair
    update = receiver.pull(background=True)
    sender.push()
    update.wait()
    receiver.verify()
    assert receiver.checksums() == sender.checksums()


def tensors(**more: Tensor) -> dict[str, Tensor]:
    return {"a": torch.zeros(40, 7), "b": torch.zeros(()), "c": torch.zeros(5, dtype=torch.int64), **more}


@pytest.mark.parametrize("empty", [False, True])
def test_versions_land_where_they_are_wanted(empty: bool, puts: list[int], meet: Callable[..., Pair]) -> None:
    more = {"none": torch.zeros(0, 3)} if empty else {}
    source, into = tensors(**more), blank(tensors(**more))
    pair = meet(source, into)
    for version in range(1, 7):
        push((fill(source, version), pair)[1])
        assert wrong(into, version) == []
    assert len(puts) == 5  # the first finds nothing exposed yet


def test_computed_on_the_way(puts: list[int], meet: Callable[..., Pair]) -> None:
    source = {"up.weight": torch.zeros(6, 40), "down": torch.zeros(8, 4).t()}
    into = {
        "up.weight": torch.zeros(40, 6, dtype=torch.int8),
        "scale": torch.zeros(40, 1),
        "down": torch.zeros(4, 8, dtype=torch.bfloat16),
    }
    rules = [weights.transpose("up.weight"), weights.quantize("up.weight", torch.int8, "scale"), weights.cast("down")]
    pair = meet(source, into, rules=rules)
    for version in range(1, 4):
        push((fill(source, version), pair)[1])
        assert torch.allclose(into["up.weight"] * into["scale"], source["up.weight"].t(), atol=0.5)
        assert torch.equal(into["down"], source["down"].to(torch.bfloat16))
    assert len(puts) == 2


@pytest.mark.parametrize("reason", ["strided", "shared memory", "larger than a bucket"])
def test_what_can_not_be_exposed_lands_as_ever(reason: str, puts: list[int], meet: Callable[..., Pair]) -> None:
    source, into, given = tensors(), blank(tensors()), dict[str, Any]()
    if reason == "strided":
        into["a"] = torch.zeros(7, 40).t()
    elif reason == "shared memory":
        memory = torch.zeros(40, 8)  # its last column is no name's
        into["a"] = memory[:, :7]
    else:
        given["bucket"] = 1024
    strides = into["a"].stride()
    pair = meet(source, into, **given)
    for version in range(1, 4):
        push((fill(source, version), pair)[1])
        assert wrong(into, version) == []
    assert not puts
    assert into["a"].stride() == strides


def test_memory_of_an_update_given_up_is_not_exposed_again(
    puts: list[int], meet: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that was stopped in the midst of it may go on to write there."""
    source, into = tensors(), blank(tensors())
    sender, receiver = pair = meet(source, into)
    push(pair)
    push((fill(source, 2), pair)[1])
    source_of = sender._part.movement.source  # type: ignore[union-attr]
    stale: list[Tensor] = []

    def fail(self: Packer, *given: Any) -> None:
        stale.extend(source_of._there.values())  # type: ignore[union-attr]
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Packer, "pack", fail)
        update = receiver.pull(background=True)
        with pytest.raises(OSError, match="the disk is gone"):
            sender.push()
        with pytest.raises(UpdateError, match="the disk is gone"):
            update.wait()
    assert wrong(into, 2) == []
    late = stale[-1]  # the other one is what was shown and was decided
    for version in (4, 5, 6, 7):
        push((fill(source, version), pair)[1])
        late.fill_(77)
        receiver.verify()
        assert wrong(into, version) == []
    assert len(puts) > 3


def many(**more: Tensor) -> dict[str, Tensor]:
    """Some windows of 1 MiB, of which tensors are parts."""
    return {f"layer.{i}": torch.zeros(300, 500) for i in range(13)} | {"large": torch.zeros(1100, 1000)} | more


def test_what_has_landed_is_summed_behind_what_is_put(
    puts: list[int], meet: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, into = many(), blank(many())
    pair = meet(source, into)
    for version in range(1, 5):
        push((fill(source, version), pair)[1])
        assert wrong(into, version) == []
    assert len(puts) == 3
    assert puts[0] > 6
    pack = Packer.pack

    def spoiled(self: Packer, chunk: Tensor, *given: Any) -> None:
        pack(self, chunk, *given)
        chunk[1] += 1

    monkeypatch.setattr(Packer, "pack", spoiled)
    update = pair[1].pull(background=True)
    with pytest.raises(CorruptionError, match="found other bits than were sent in"):
        pair[0].push()
    with pytest.raises(CorruptionError, match="found other bits than were sent in"):
        update.wait()
    assert wrong(into, 4) == []
    pair[1].verify()


def test_tensors_land_by_name_whatever_their_order() -> None:
    """A replica's rank may have them in another order than rank 0, whose order the plan has."""
    model = {"a": torch.zeros(2, 3), "b": torch.zeros(7), "c": torch.zeros(3)}
    engine = weights.ModuleEngine(model)
    engine.look()
    places, nbytes = places_of((name, tuple(model[name].shape), torch.float32) for name in ("c", "a", "b"))
    for version in (1, 2, 3):
        file = engine.expose(places, nbytes)
        assert file is not None
        engine.begin()
        engine.land(file, places)
        fill(file.tensors(places), version)
        engine.arrived(places)
        engine.commit(version)
        assert wrong(model, version) == []


def test_a_child_keeps_the_version_of_its_birth(puts: list[int], meet: Callable[..., Pair]) -> None:
    source, into = tensors(), blank(tensors())
    pair = meet(source, into)
    for version in (1, 2, 3):
        push((fill(source, version), pair)[1])
    with forked_with(into, 3):
        for version in (4, 5, 6):
            push((fill(source, version), pair)[1])
            assert wrong(into, version) == []
    assert len(puts) == 5


def test_nothing_is_left_but_what_is_shown(puts: list[int], meet: Callable[..., Pair], tmp_path: Path) -> None:
    def files() -> int:
        gc.collect()
        found = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum("unisono:standby" in str(link.readlink()) for link in found if link.is_symlink())

    before, source, into = files(), tensors(), tensors()
    for _ in range(3):
        with trainer(str(tmp_path), source) as sender, replica(str(tmp_path), into) as receiver:
            for _ in range(4):
                push((sender, receiver))
    del sender, receiver
    assert puts
    assert files() == before + 1
    del into
    assert files() == before

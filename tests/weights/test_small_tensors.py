"""Many small tensors are copied at once into those that serve, which keep their place; larger ones are exchanged."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from unisono import weights
from weights.live import blank, fill, forked_with, wrong

TCP = "tcp://127.0.0.1:0"


def model(count: int = 300, **more: Tensor) -> dict[str, Tensor]:
    return {
        f"small.{i}": torch.zeros(1 + i % 40, dtype=(torch.float32, torch.int16)[i % 2]) for i in range(count)
    } | more


@pytest.fixture
def updates() -> Iterator[Any]:
    """Pushes a source again and again into a model, and looks at that."""
    made: list[Any] = []

    def updates(source: dict[str, Tensor], into: Any, **given: Any) -> Any:
        made.append(weights.Sender(TCP, source, timeout=10, **given))
        made.append(weights.Receiver(made[0].address, into, timeout=10))

        def update() -> weights.Report:
            pulled = made[1].pull(background=True)
            made[0].push()
            pulled.wait()
            made[1].verify()
            report: weights.Report = pulled.wait()
            return report

        return update

    yield updates
    for each in reversed(made):
        each.close()


def places(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def test_small_ones_stay_where_they_are(updates: Any) -> None:
    source, into = model(large=torch.zeros(600, 600)), blank(model(large=torch.zeros(600, 600)))
    update, came = updates(source, into), places(into)
    fill(source, 1)
    update()
    before = places(into)
    assert set(before.values()).isdisjoint(came.values())  # memory of the engine's own
    for version in range(2, 6):
        fill(source, version)
        update()
        assert wrong(into, version) == []
    moved = {name for name, place in places(into).items() if place != before[name]}
    assert moved == {"large"}


def test_memory_that_a_model_came_with_is_not_written(updates: Any) -> None:
    """It may be a file's, or be shared with children that read the version of their birth."""
    source, into = model(), blank(model())
    before = {name: tensor.numpy() for name, tensor in into.items()}
    for tensor in before.values():
        tensor.flags.writeable = False
    with pytest.warns(UserWarning, match="not writable"):
        into = {name: torch.from_numpy(tensor) for name, tensor in before.items()}
    update = updates(source, into)
    for version in (1, 2, 3):
        fill(source, version)
        update()
        assert wrong(into, version) == []
    assert all((tensor == -1).all() for tensor in before.values())


def test_a_child_keeps_the_version_of_its_birth(updates: Any) -> None:
    source, into = model(large=torch.zeros(600, 600)), blank(model(large=torch.zeros(600, 600)))
    update = updates(source, into)
    for version in (1, 2, 3):
        fill(source, version)
        update()
    with forked_with(into, 3):
        for version in (4, 5, 6):
            fill(source, version)
            update()
            assert wrong(into, version) == []


def test_few_are_exchanged(updates: Any) -> None:
    source, into = model(20), blank(model(20))
    update, before = updates(source, into), places(into)
    for version in (1, 2):
        fill(source, version)
        update()
    assert wrong(into, 2) == []
    assert set(places(into).values()).isdisjoint(before.values())


def test_ties_stay_and_others_are_exchanged_beside_them(updates: Any) -> None:
    source, into = model(large=torch.zeros(90, 90)), blank(model(large=torch.zeros(90, 90)))
    source["tied"] = source["small.3"]
    into["tied"] = into["small.3"]
    update = updates(source, into)
    for version in (1, 2, 3):
        fill(source, version)
        update()
        assert wrong(into, version, {"small.3": source["tied"]}) == []
        assert into["tied"].data_ptr() == into["small.3"].data_ptr()


def test_what_a_subclass_lands_elsewhere_is_copied_by_its_strides(updates: Any) -> None:
    class Elsewhere(weights.ModuleEngine):
        def load(self, bucket: Any) -> None:
            for name in bucket:
                if self.standby[name].dim() == 2:
                    self.standby[name] = self.standby[name].t().contiguous().t()

    source, into = model(square=torch.zeros(6, 6)), blank(model(square=torch.zeros(6, 6)))
    update = updates(source, Elsewhere(into))
    for version in (1, 2, 3):
        fill(source, version)
        update()
        assert wrong(into, version) == []


@pytest.mark.parametrize("count", [10, 300])
def test_a_part_of_the_tensors_is_copied(count: int, updates: Any) -> None:
    source, into = model(count, large=torch.zeros(90, 90)), blank(model(count, large=torch.zeros(90, 90)))
    update = updates(source, into, delta=True)
    fill(source, 1)
    update()
    before = places(into)
    for version in (2, 3, 4):
        for name in ("small.3", "large"):
            fill({name: source[name]}, version)
        assert update().skipped == count - 1
        assert wrong(into, 1, {name: source[name] for name in ("small.3", "large")}) == []
    assert places(into) == before

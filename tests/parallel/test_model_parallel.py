import copy

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ranks import ranks
from unisono.errors import UsageError
from unisono.parallel.pipeline import ModelParallel, distribute_parts, split_model


def net() -> nn.Sequential:
    torch.manual_seed(4)
    made = nn.Sequential()
    made.add_module("seq1", nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU()))
    made.add_module("layer2", nn.Conv2d(3, 3, 3))
    made.add_module("layer3", nn.Conv2d(3, 2, 3))
    made.add_module("flatten", nn.Flatten())
    made.add_module("fc", nn.Linear(2 * 2 * 2, 5))
    return made


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 3, 4, 0])


def train(model: nn.Module, steps: int = 3) -> None:
    images, labels = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def test_cut_keeps_names_and_modules() -> None:
    whole = net()
    first, second = split_model(whole, before=["layer3"])
    assert [name for name, _ in first.named_children()] == ["seq1", "layer2"]
    assert [name for name, _ in second.named_children()] == ["layer3", "flatten", "fc"]
    assert second.fc is whole.fc
    images, _ = batch()
    assert torch.equal(second.eval()(first.eval()(images)), whole.eval()(images))
    assert len(split_model(whole, [])) == 1


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (["layer9"], "the model has no child 'layer9': it has seq1, layer2, layer3, flatten, fc"),
        (["fc", "layer2"], "cuts before fc, layer2 leave a part empty"),
        (["seq1"], "cuts before seq1 leave a part empty"),
    ],
)
def test_cuts_that_cannot_be_made(before: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        split_model(net(), before)
    assert message in str(caught.value)


def test_two_devices_in_one_process_train_like_one() -> None:
    whole, other = net(), net()
    split = ModelParallel(split_model(other, before=["layer2", "fc"]), ["cpu", "cpu:0", "cpu"])
    train(whole)
    train(split)
    for mine, want in zip(split.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, want)


def test_parts_move_to_their_devices() -> None:
    split = ModelParallel(split_model(net(), before=["layer3"]), ["cpu", "meta"])
    assert {p.device.type for p in split.parts[0].parameters()} == {"cpu"}
    assert {p.device.type for p in split.parts[1].parameters()} == {"meta"}
    output = split(batch()[0])
    assert (output.device.type, output.shape) == ("meta", (6, 5))
    with pytest.raises(UsageError, match="2 parts need a device each, got 1 devices"):
        ModelParallel(split_model(net(), before=["layer3"]), ["cpu"])


def test_a_trace_shows_parts_and_borders_in_both_directions() -> None:
    split = ModelParallel(split_model(net(), before=["layer3"]), ["cpu", "cpu"])
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        train(split, 2)
    found = {event.key: event.count for event in trace.key_averages() if event.key.startswith("split ")}
    assert found == {
        "split part 0 forward (cpu)": 2,
        "split part 1 forward (cpu)": 2,
        "split border 0 to 1 (cpu)": 2,
        "split border 1 to 0 (cpu)": 2,
    }


def on_ranks(rank: int, world_size: int) -> None:
    whole, parts = net(), split_model(net(), before=["layer3"])
    before = copy.deepcopy(parts[1 - rank].state_dict())
    split = distribute_parts(parts, nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(parts[rank].parameters(), lr=0.2, momentum=0.9)
    train(whole)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        for _ in range(3):
            optimizer.zero_grad()
            loss = split.step(*batch())
            optimizer.step()
    assert (loss is None) == (rank == 0)
    mine, wanted = parts[rank].state_dict(), split_model(whole, before=["layer3"])[rank].state_dict()
    for name, value in wanted.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-6, msg=name)
    assert all(torch.equal(value, before[name]) for name, value in parts[1 - rank].state_dict().items())
    found = {event.key: event.count for event in trace.key_averages() if event.key.startswith("pipeline ")}
    assert found == {f"pipeline {rank}F0": 3, f"pipeline {rank}BW0": 3}
    with pytest.raises(UsageError, match="3 parts do not fit a group of 2 ranks: one for each"):
        distribute_parts([*parts, nn.Identity()], nn.functional.cross_entropy)


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_each_rank_runs_and_updates_its_own_part(backend: str) -> None:
    ranks(2, backend=backend).run(on_ranks)

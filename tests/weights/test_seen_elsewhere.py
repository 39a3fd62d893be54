"""Memory that something else has too: a version is copied into it; an exchange would leave the other behind."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ranks import ranks
from unisono import weights
from unisono.errors import UpdateError, UsageError
from unisono.transport.shared_heap import BOUNDS
from weights.live import Net, blank, fill, wrong

TCP = "tcp://127.0.0.1:0"
ALIASES: dict[str, Callable[[nn.Module], Mapping[str, Tensor]]] = {
    "state_dict": lambda model: model.state_dict(),
    "data": lambda model: {name: parameter.data for name, parameter in model.named_parameters()},
    "detached": lambda model: {name: parameter.detach() for name, parameter in model.named_parameters()},
}


def updated(sender: weights.Sender, receiver: weights.Receiver, source: Any, version: int) -> None:
    fill(source, version)
    pulled = receiver.pull(background=True)
    sender.push()
    pulled.wait()


@pytest.mark.parametrize("kind", ALIASES)
def test_a_mapping_of_a_model_s_memory_receives_into_the_model(kind: str) -> None:
    source, model = Net(), blank(Net())
    with (
        weights.Sender(TCP, source, timeout=10) as sender,
        weights.Receiver(sender.address, ALIASES[kind](model), timeout=10) as receiver,
    ):
        for version in (1, 2, 3):
            updated(sender, receiver, source, version)
            assert wrong(model, version) == []
        receiver.verify()


def test_a_view_sees_what_the_model_has() -> None:
    source, model = Net(), blank(Net())
    view, numbers = model.up.weight.detach(), model.down.weight.detach().numpy()
    with (
        weights.Sender(TCP, source, timeout=10) as sender,
        weights.Receiver(sender.address, model, timeout=10) as receiver,
    ):
        updated(sender, receiver, source, 1)
        assert wrong(model, 1) == []
        assert torch.equal(view, source.up.weight)
        assert torch.equal(torch.from_numpy(numbers), source.down.weight)
        del view, numbers
        before = model.up.weight.data_ptr()
        updated(sender, receiver, source, 2)
        assert wrong(model, 2) == []
        assert model.up.weight.data_ptr() != before


def test_memory_that_a_mapping_has_too_can_not_be_mapped() -> None:
    model = Net()
    words = r"can not be mapped: embed.weight shares its memory with another tensor \(a view, a state_dict's"
    with (
        weights.Sender(TCP, Net(), timeout=10) as sender,
        weights.Receiver(sender.address, model.state_dict(), timeout=10, mapped=True) as receiver,
    ):
        pulled = receiver.pull(background=True)
        with pytest.raises(UpdateError, match=words):
            sender.push()
        with pytest.raises(UsageError, match=words):
            pulled.wait()


def test_a_model_that_was_mapped_may_be_mapped_again() -> None:
    source, model = Net(), Net()
    for version in (1, 2, 3):
        with (
            weights.Sender(TCP, fill(source, version), timeout=10) as sender,
            weights.Receiver(sender.address, model, timeout=10, mapped=version != 2) as receiver,
        ):
            updated(sender, receiver, source, version)
            assert wrong(model, version) == []
        del receiver


def shared(tensor: Tensor) -> bool:
    low, high = BOUNDS
    return low <= tensor.data_ptr() < high


def test_what_is_seen_elsewhere_is_not_shared() -> None:
    model = Net()
    view = model.up.weight.detach()
    weights.share(model)
    assert [shared(model.up.weight), shared(model.down.weight)] == [False, True]
    with torch.no_grad():
        model.up.weight.fill_(7.0)
    assert view.unique().tolist() == [7.0]
    state = Net().state_dict()
    weights.share(state)
    assert all(shared(tensor) for tensor in state.values())


def fsdp(rank: int, world_size: int, folder: str, whole: bool) -> Any:
    """Rank 0 sends; the others hold a model of FSDP2 and run it: what the last run gathered is no version's."""
    receivers, source, address = dist.new_group([1, 2]), Net(), f"file://{folder}/meeting"
    found, inputs = [], torch.tensor([[1, 2, 3]])
    if rank == 0:
        with weights.Sender(address, source, group="self", timeout=20) as sender:
            for version in (1, 2, 3):
                fill(source, version)
                sender.push()
        return []
    model, mesh = Running(), DeviceMesh("cpu", [1, 2])
    for layer in [] if whole else [model.up, model.down]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        model(inputs)
        with weights.Receiver(address, model, group=receivers, name="gen", timeout=20) as receiver:
            for version in (1, 2, 3):
                receiver.pull()
                expected = fill(Running(), version)(inputs)
                found.append(torch.equal(model(inputs), expected))
    return found


class Running(Net):
    """A net that runs."""

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.down(self.up(self.norm(self.embed(tokens))))
        return found


@pytest.mark.parametrize("whole", [False, True])
def test_a_replica_of_fsdp2_runs_what_it_has_received(whole: bool, tmp_path: Path) -> None:
    assert ranks(3, backend="gloo").run(fsdp, str(tmp_path), whole)[1:] == [[True] * 3] * 2

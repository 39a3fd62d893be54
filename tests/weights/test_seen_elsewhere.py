"""Memory that something else has too: a version is copied into it; an exchange would leave the other behind."""

import time
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
from weights.live import Net, blank, fill, raise_flag, wait_for, wrong

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
    words = (
        r"can not be mapped: embed.weight shares its memory with another tensor \(a view, a state_dict's\) or process"
    )
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


def fsdp_in_threads(rank: int, world_size: int, folder: str, stays_gathered: bool) -> Any:
    """Rank 0 sends; the others follow, and run a model of FSDP2 under holds meanwhile: a look ends no pass."""
    receivers, source, last = dist.new_group([1, 2]), Net(), 12
    inputs, address = torch.tensor([[1, 2, 3]]), f"file://{folder}/meeting"
    if rank == 0:
        with weights.Sender(address, source, group="self", timeout=20) as sender:
            for version in range(1, last + 1):
                fill(source, version)
                sender.push()
            wait_for(folder, "done")
        return []
    model, mesh, found = Running(), DeviceMesh("cpu", [1, 2]), dict[int | None, bool]()
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh, reshard_after_forward=not stays_gathered)
    fully_shard(model, mesh=mesh, reshard_after_forward=not stays_gathered)
    expected = {version: fill(Running(), version)(inputs) for version in range(1, last + 1)}
    with torch.no_grad():
        model(inputs)
    with torch.no_grad(), weights.Receiver(address, model, group=receivers, name="gen", timeout=20) as receiver:
        model.up.register_forward_hook(lambda *_: time.sleep(0.003))
        receiver.follow()
        while last not in found:
            with receiver.hold() as version:
                output = model(inputs)
                if version is not None:
                    found[version] = found.get(version, True) and torch.equal(output, expected[version])
        dist.barrier(receivers)
        raise_flag(folder, "done")
        receiver.verify()  # of what lies in the shards, gathered or not
    return [receiver.error, len(found) > last // 2 and all(found.values())]


@pytest.mark.parametrize("stays_gathered", [False, True])
def test_a_replica_of_fsdp2_runs_while_it_follows(stays_gathered: bool, tmp_path: Path) -> None:
    assert ranks(3, backend="gloo").run(fsdp_in_threads, str(tmp_path), stays_gathered)[1:] == [[None, True]] * 2


def test_memory_of_several_processes_stays() -> None:
    """As a model's that torch.multiprocessing has handed to others, which would run the version before for ever."""
    source, model = Net(), Net()
    model.share_memory()
    before = [each.data_ptr() for each in model.parameters()]
    with (
        weights.Sender(TCP, source, timeout=10) as sender,
        weights.Receiver(sender.address, model, timeout=10) as receiver,
    ):
        updated(sender, receiver, source, 1)
        assert wrong(model, 1) == []
    assert [each.data_ptr() for each in model.parameters()] == before
    assert all(each.is_shared() for each in model.parameters())


def test_a_model_made_in_inference_mode_runs_after_an_update() -> None:
    source, tokens = Running(), torch.tensor([1, 2, 3])
    with torch.inference_mode():
        model, other = Running(), Running()
    with (
        weights.Sender(TCP, source, timeout=10) as sender,
        weights.Receiver(sender.address, model, timeout=10) as receiver,
    ):
        for version in (1, 2):
            updated(sender, receiver, source, version)
            with torch.inference_mode():
                assert torch.equal(model(tokens), source(tokens))
    words = "can not be mapped: embed.weight was made in inference mode"
    with (
        weights.Sender(TCP, source, timeout=10) as sender,
        weights.Receiver(sender.address, other, timeout=10, mapped=True) as receiver,
    ):
        pulled = receiver.pull(background=True)
        with pytest.raises(UpdateError, match=words):
            sender.push()
        with pytest.raises(UsageError, match=words):
            pulled.wait()


@pytest.mark.parametrize("commit", ["swap", "copy"])
def test_memory_that_was_freed_is_named(commit: str) -> None:
    """Offloaded, or of an engine that sleeps: reading or writing it would end the process."""
    source, into = {"a": torch.ones(10), "b": torch.ones(3)}, {"a": torch.zeros(10), "b": torch.zeros(3)}
    words = "no memory, the storage was freed"
    with (
        weights.Sender(TCP, source, timeout=10) as sender,
        weights.Receiver(sender.address, weights.ModuleEngine(into, commit=commit), timeout=10) as receiver,
    ):
        updated(sender, receiver, source, 1)
        for _ in range(2):
            source["a"].untyped_storage().resize_(0)
            with pytest.raises(UsageError, match=words):
                sender.push()
            source["a"] = torch.ones(10)
            into["a"] = torch.zeros(10)  # torch refuses to resize what the replica has exposed
            into["a"].untyped_storage().resize_(0)
            pulled = receiver.pull(background=True)
            with pytest.raises(UpdateError, match=words):
                sender.push()
            for call in (pulled.wait, receiver.verify):
                with pytest.raises(UsageError, match=words):
                    call()
            into["a"], into["b"] = torch.zeros(10), torch.zeros(3)
            updated(sender, receiver, source, receiver.version + 2)
            assert torch.equal(into["a"], source["a"])

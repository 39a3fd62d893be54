"""Models as users wrap them: the names they then have either fit, or the error names the rules that mend them."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from unisono import weights
from unisono.errors import MismatchError
from unisono.weights import cast, ignore, rename
from unisono.weights.rules import Rule
from weights.live import Net, blank, fill, wrong


class Holder(nn.Module):
    """What DistributedDataParallel does to names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Adapted(nn.Module):
    """What PEFT's LoRA does to a layer: its own under `base_layer`, two small ones beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, layer.out_features, bias=False)})

    def merge(self) -> None:
        """As PEFT does: the adapter's product is added to what is under `data`."""
        self.base_layer.weight.data += self.lora_B["default"].weight @ self.lora_A["default"].weight


class BaseModel(nn.Module):
    """The outer names of a PEFT model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model


def adapted() -> BaseModel:
    net = Net()
    net.up = Adapted(net.up)  # type: ignore[assignment]
    return BaseModel(net)


def compiled_inside() -> Net:
    net = Net()
    net.up = torch.compile(net.up, backend="eager")  # type: ignore[assignment]
    return net


def checkpointed() -> Net:
    net = Net()
    net.up = checkpoint_wrapper(net.up)
    return net


def update(sent: nn.Module, wanted: nn.Module, rules: Sequence[Rule]) -> None:
    with (
        weights.Sender("tcp://127.0.0.1:0", sent, rules=rules, timeout=10) as sender,
        weights.Receiver(sender.address, wanted, timeout=10) as receiver,
    ):
        for _ in range(2):
            pulled = receiver.pull(background=True)
            try:
                sender.push()
            finally:
                pulled._ended.wait()
            pulled.wait()
        receiver.verify()


WRAPPED: list[tuple[Callable[[], nn.Module], list[Rule]]] = [
    (lambda: Holder(Net()), [rename("module.*", "*")]),
    (lambda: torch.compile(Net(), backend="eager"), [rename("_orig_mod.*", "*")]),  # type: ignore[arg-type, return-value]
    (lambda: Holder(torch.compile(Net(), backend="eager")), [rename("module._orig_mod.*", "*")]),  # type: ignore[arg-type]
    (compiled_inside, [rename("*._orig_mod.*", "*.*")]),
    (adapted, [rename("base_model.model.*", "*"), rename("*.base_layer.*", "*.*"), ignore("*.lora_*")]),
]


@pytest.mark.parametrize(("make", "rules"), WRAPPED)
def test_names_of_wrappers(make: Callable[[], nn.Module], rules: list[Rule]) -> None:
    sent, wanted = make(), blank(Net())
    plain = Net()
    fill(plain, 1)
    with pytest.raises(MismatchError) as error:
        update(sent, wanted, [])
    assert all(str(rule) in str(error.value) for rule in rules[:2] if "lora" not in str(rule))
    own = dict(sent.named_parameters())
    with torch.no_grad():
        for name, tensor in plain.state_dict().items():
            matching = [key for key in own if _bare(key) == name]
            own[matching[0]].copy_(tensor)
    update(sent, wanted, rules)
    assert wrong(wanted, 1) == []


def _bare(name: str) -> str:
    added = {"module", "_orig_mod", "base_model", "model", "base_layer"}
    return ".".join(part for part in name.split(".") if part not in added)


def test_what_checkpoints_activations_has_the_names_of_the_model() -> None:
    for sent, wanted in ((checkpointed(), Net()), (Net(), checkpointed())):
        update(fill(sent, 2), blank(wanted), [])
        assert wrong(wanted, 2) == []


def test_adapters_merged_and_not() -> None:
    sent, wanted = adapted(), Net()
    rules = [rename("base_model.model.*", "*"), rename("*.base_layer.*", "*.*"), ignore("*.lora_*")]
    layer = sent.base_model.model.up  # type: ignore[union-attr]
    assert isinstance(layer, Adapted)
    nn.init.ones_(layer.lora_B["default"].weight)  # type: ignore[arg-type]
    before = layer.base_layer.weight.clone()
    update(sent, wanted, rules)
    assert torch.equal(wanted.up.weight, before)
    layer.merge()
    update(sent, wanted, rules)
    assert torch.equal(wanted.up.weight, layer.base_layer.weight)
    assert not torch.equal(wanted.up.weight, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_bfloat16_trainer(dtype: torch.dtype) -> None:
    sent, wanted = fill(Net().bfloat16(), 3), blank(Net().to(dtype))
    with pytest.raises(MismatchError, match=r'cast\("up.weight"\)'):
        update(sent, wanted, [])
    update(sent, wanted, [cast()])
    assert wrong(wanted, 3) == []
    assert {parameter.dtype for parameter in wanted.parameters()} == {dtype}


def test_frozen_parameters_and_gradients_stay_what_they_are() -> None:
    sent, wanted = fill(Net(), 1), blank(Net())
    sent.up.requires_grad_(False)
    wanted.embed.requires_grad_(False)
    wanted.down.weight.grad = torch.ones(4, 6)
    with (
        weights.Sender("tcp://127.0.0.1:0", sent, timeout=10) as sender,
        weights.Receiver(sender.address, wanted, timeout=10) as receiver,
    ):
        for version in (1, 2, 3):
            fill(sent, version)
            pulled = receiver.pull(background=True)
            sender.push()
            pulled.wait()
            assert wrong(wanted, version) == []
            assert [p.requires_grad for p in wanted.up.parameters()] == [version != 2] * 2
            sent.requires_grad_(version == 1)
            wanted.up.requires_grad_(version != 1)
        assert not wanted.embed.weight.requires_grad
        assert torch.equal(wanted.down.weight.grad, torch.ones(4, 6))

"""The public interface of `unisono.weights`: names, order of arguments, defaults."""

import inspect
from typing import Any

import pytest

from unisono import weights

MIB32 = 32 << 20
SIGNATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Sender": (
        "address source * rules shard receivers group delta bucket checksum lost backend timeout",
        {
            "rules": (), "shard": None, "receivers": 1, "group": None, "delta": False, "bucket": MIB32,
            "checksum": True, "lost": "raise", "backend": "gloo", "timeout": 60.0,
        },
    ),
    "Sender.push": (
        "self version * source background timeout",
        {"version": None, "source": None, "background": False, "timeout": None},
    ),
    "Receiver": (
        "address engine * rules shard name group mapped timeout",
        {"rules": (), "shard": None, "name": None, "group": None, "mapped": False, "timeout": 60.0},
    ),
    "Receiver.pull": (
        "self version * background timeout", {"version": None, "background": False, "timeout": None},
    ),
    "Receiver.follow": ("self on_update on_error", {"on_update": None, "on_error": None}),
    "sync": (
        "model src * group rules shard bucket checksum version timeout",
        {
            "src": 0, "group": None, "rules": (), "shard": None, "bucket": MIB32, "checksum": True, "version": None,
            "timeout": 60.0,
        },
    ),
    "layout": ("source * shard group", {"shard": None, "group": None}),
    "Layout.split": ("self world_size shard", {"shard": None}),
    "Shard": ("dim parts", {"parts": 1}),
    "plan": ("sender receivers rules * bucket forward", {"rules": (), "bucket": MIB32, "forward": "auto"}),
    "fuse": ("parts new dim", {"dim": 0}),
    "split": ("old new dim sizes", {"dim": 0, "sizes": None}),
    "transpose": ("pattern dims", {"dims": (1, 0)}),
    "cast": ("pattern dtype", {"pattern": "*", "dtype": None}),
    "quantize": ("pattern dtype scale dim", {"dim": 0}),
    "ModuleEngine": ("module * standby commit", {"standby": True, "commit": "swap"}),
    "Update.wait": ("self timeout", {"timeout": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    found: Any = weights
    for part in name.split("."):
        found = getattr(found, part)
    order, defaults = SIGNATURES[name]
    before, _, after = order.partition("* ")
    parameters = inspect.signature(found).parameters.values()
    assert [each.name for each in parameters] == [*before.split(), *after.split()]
    assert [each.name for each in parameters if each.kind == each.KEYWORD_ONLY] == after.split()
    assert {each.name: each.default for each in parameters if each.default is not each.empty} == defaults


def test_attributes() -> None:
    assert {"version", "receivers", "plan", "checksums", "close", "push", "__enter__"} <= set(dir(weights.Sender))
    wanted = {"pull", "follow", "hold", "version", "plan", "verify", "checksums", "close", "__enter__"}
    assert wanted <= set(dir(weights.Receiver))
    parts = {"nbytes", "sent", "received", "schedule", "chunks", "verify", "simulate", "bound", "draw", "explain"}
    with weights.Sender("tcp://127.0.0.1:0", {}) as sender, weights.Receiver(sender.address, {}) as receiver:
        assert [sender.version, receiver.version, receiver.error, sender.plan] == [None] * 4
        update = receiver.pull(background=True)
        sender.push()
        update.wait(10)
        assert sender.plan is not None
        assert parts <= set(dir(sender.plan))
    fields = "version receivers lost tensors skipped nbytes moved snapshot seconds bound checksum"
    assert list(weights.Report.__dataclass_fields__) == fields.split()
    report = weights.Report(4, ("a", "b", "c"), (), 302, 0, 33_600_000, 0, 0, 0.041, 0.041 * 0.87)
    assert str(report) == "version 4: 302 tensors, 33.6 MB to 3 receivers in 41 ms, 87 % of the bound"

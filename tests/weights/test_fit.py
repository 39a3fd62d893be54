"""What does not fit: every difference, with both shapes and dtypes, nearest names and a rule that mends it."""

import re
from typing import Any

import pytest
import torch

import unisono.weights as w
from unisono.errors import MismatchError
from unisono.weights import cast, ignore, layout, plan, rename, tie, transpose
from unisono.weights.fit import fit


def empty(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape) for name, shape in shapes.items()}


def told(sent: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """The lines of the error, without the first."""
    with pytest.raises(MismatchError) as caught:
        fit(layout(sent), layout(wanted), (), "replica gen-1")
    first, *lines = str(caught.value).splitlines()
    assert first == f"what is sent does not fit replica gen-1: {len(lines)} difference{'s' * (len(lines) > 1)}"
    return [re.sub(" +", " ", line).strip() for line in lines]


def test_everything_at_once() -> None:
    sent = {"model.up.weight": torch.empty(3, 2), "model.extra.bias": torch.empty(3), "t": torch.empty(2, 3)}
    sent |= {"h": torch.empty(2), "i": torch.empty(2)}
    wanted = {"up.weight": torch.empty(3, 2), "norm.scale": torch.empty(4), "t": torch.empty(3, 2)}
    wanted |= {"h": torch.empty(2).half(), "i": torch.empty(2, dtype=torch.int8)}
    assert told(sent, wanted) == [
        "missing up.weight float32 [3, 2] is wanted and not sent; nearest: model.up.weight; "
        'rename("model.*", "*") or ignore("up.weight")',
        'missing norm.scale float32 [4] is wanted and not sent; ignore("norm.scale")',
        'shape t float32 [2, 3] is sent, float32 [3, 2] is wanted; transpose("t")',
        'dtype h float32 [2] is sent, float16 [2] is wanted; cast("h")',
        'dtype i float32 [2] is sent, int8 [2] is wanted; cast("i", torch.int8)',
        "unexpected model.up.weight float32 [3, 2] is sent and not wanted; nearest: up.weight; "
        'rename("model.*", "*") or ignore("model.up.weight")',
        'unexpected model.extra.bias float32 [3] is sent and not wanted; ignore("model.extra.bias")',
    ]


MENDED: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = [
    (empty(**{"m.a.w": (2,), "m.b.w": (3,)}), empty(**{"a.w": (2,), "b.w": (3,)})),
    (empty(**{"a.w": (2,), "b.w": (3,)}), empty(**{"m.a.w": (2,), "m.b.w": (3,)})),
    (empty(**{"attention.w": (2,)}), empty(**{"self_attn.w": (2,)})),
    (empty(**{"0._orig_mod.w": (2,), "1._orig_mod.b": (3,)}), empty(**{"0.w": (2,), "1.b": (3,)})),
    (empty(**{"p.m.x.q.base.w": (2,), "p.m.x.k.base.w": (3,)}), empty(**{"x.q.w": (2,), "x.k.w": (3,)})),
    (empty(**{"x.0.w": (2,), "x.1.w": (3,)}), empty(**{"x.w": (2,), "x.1.w": (3,)})),
    (empty(w=(2, 3)), empty(w=(3, 2))),
    (empty(w=(2, 3, 4)), empty(w=(4, 2, 3))),
    ({"w": torch.empty(2)}, {"w": torch.empty(2).bfloat16()}),
    ({"w": torch.empty(2)}, {"w": torch.empty(2, dtype=torch.int64)}),
]


@pytest.mark.parametrize(("sent", "wanted"), MENDED)
def test_the_rule_that_is_named_mends_it(sent: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    line = told(sent, wanted)[0]
    rule = line.rpartition("; ")[2].partition(" or ")[0]
    names: dict[str, Any] = {name: getattr(w, name) for name in w.__all__} | {"torch": torch}
    assert fit(layout(sent), layout(wanted), eval(f"[{rule}]", names)).names == tuple(wanted)


def test_many_names_are_compared_in_little_time() -> None:
    sent = {f"model.layers.{i}.mlp.up_proj.weight": torch.empty(2, device="meta") for i in range(1500)}
    wanted = {f"h.{i}.feed.up.weight": torch.empty(2, device="meta") for i in range(1500)}
    assert len(told(sent, wanted)) == 3000


def test_a_name_tied_to_one_that_arrives_has_arrived() -> None:
    wanted = {"embed": (t := torch.empty(5, 3)), "lm_head": t}
    for name in wanted:
        found = fit(layout({name: torch.empty(5, 3)}), layout(wanted))
        assert (tuple(found.tensors), found.ties) == (("embed",), {"lm_head": "embed"})
        assert found.nbytes == 60


def test_a_senders_tied_name_that_is_not_wanted_is_no_difference() -> None:
    sent = {"embed": (t := torch.empty(5, 3)), "lm_head": t}
    assert fit(layout(sent), layout({"embed": torch.empty(5, 3)})).names == ("embed",)
    assert fit(layout(sent), layout({"model.lm_head": torch.empty(5, 3)}), [rename("*", "model.*")]).names == (
        "model.lm_head",
    )


def test_tied_tensors_are_sent_once() -> None:
    both = {"embed": (t := torch.empty(5, 3)), "lm_head": t}
    assert plan(layout(both), layout(both)).nbytes == 60
    loose = {"embed": torch.empty(5, 3), "lm_head": torch.empty(5, 3)}
    assert plan(layout(both), layout(loose)).nbytes == 120


def test_two_tensors_for_one_that_is_tied_are_a_difference() -> None:
    tied = {"embed": (t := torch.empty(5, 3)), "lm_head": t}
    loose = {"embed": torch.empty(5, 3), "lm_head": torch.empty(5, 3)}
    (line,) = told(loose, tied)
    assert line == (
        "tied lm_head float32 [5, 3] is sent beside embed, to which the receiver ties it; "
        'tie("lm_head", "embed") or ignore("lm_head")'
    )
    for rule in (tie("lm_head", "embed"), ignore("lm_head")):
        assert fit(layout(loose), layout(tied), [rule]).names == ("embed", "lm_head")


def test_tensors_without_elements_agree() -> None:
    empty = torch.empty(0, 3)
    sent, wanted = layout({"a": empty, "b": empty.clone()}), layout({"a": empty, "b": empty})
    assert fit(sent, wanted).ties == {"b": "a"}


def test_only_is_what_a_delta_leaves() -> None:
    found = fit(layout(empty(a=(2,), b=(3,), c=(4,))), layout(empty(a=(2,), b=(3,), c=(4,))))
    assert (found.only({"b"}).names, found.only({"b"}).nbytes) == (("b",), 12)
    assert found.sources() == {"a", "b", "c"}


def test_a_cast_without_a_dtype_leaves_integers_alone() -> None:
    sent, wanted = {"n": torch.arange(3), "x": torch.empty(3)}, {"n": torch.arange(3).int(), "x": torch.empty(3).half()}
    with pytest.raises(MismatchError, match=r"n +int64 \[3\] is sent, int32 \[3\] is wanted") as caught:
        fit(layout(sent), layout(wanted), [cast()])
    assert "1 difference\n" in str(caught.value)


def test_no_tensors_and_no_dims() -> None:
    assert fit(layout({}), layout({})).names == ()
    assert fit(layout({"s": torch.tensor(1.0)}), layout({"s": torch.tensor(2.0)}), [transpose("s", ())]).nbytes == 4

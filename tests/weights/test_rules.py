"""Rules: each against torch's operations on whole tensors, however both sides are cut; text form; what is refused."""

import re
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unisono.errors import UsageError
from unisono.weights import cast, fuse, ignore, plan, quantize, rename, split, tie, transpose
from unisono.weights.rules import Rule, load_rules, rules_from_text, rules_to_text
from weights.moving import assert_same, held, layouts_of, moved, whole_layout

Named = dict[str, Tensor]
QMAX = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def quantized(x: Tensor, dtype: torch.dtype, dim: int | None) -> tuple[Tensor, Tensor]:
    """The page's formula, on the whole."""
    x = x.to(torch.float32)
    others = [d for d in range(x.dim()) if d != dim]
    largest = x.abs().amax() if dim is None else x.abs().amax(others, keepdim=True) if others else x.abs()
    scale = largest / QMAX[dtype]
    scale = torch.where(scale == 0, torch.ones(()), scale)
    if dtype == torch.int8:
        return (x / scale).round().clamp(-128, 127).to(torch.int8), scale
    return (x / scale).clamp(-QMAX[dtype], QMAX[dtype]).to(dtype), scale


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


Q, K, V = sample(8, 6), sample(4, 6, seed=1), sample(4, 6, seed=2)
ROW = sample(5, 7, seed=3)
ROW[2] = 0
CASES: dict[str, tuple[Named, Sequence[Rule], Named]] = {
    "rename": ({"module.a.w": Q}, [rename("module.*", "*")], {"a.w": Q}),
    "rename twice": ({"a": Q, "b": K}, [rename("a", "c"), rename("b", "a")], {"c": Q, "a": K}),
    "rename by expression": ({"h.3.w": Q}, [rename(re.compile(r"h\.(\d+)\.(\w)"), r"\2.of.\1")], {"w.of.3": Q}),
    "rename whatever the case": ({"H.W": Q}, [rename(re.compile(r"h\.(.)", re.IGNORECASE), "*")], {"W": Q}),
    "fuse": (
        {"x.q.weight": Q, "x.k.weight": K, "x.v.weight": V},
        [fuse(["*.q.weight", "*.k.weight", "*.v.weight"], "*.qkv.weight")],
        {"x.qkv.weight": torch.cat([Q, K, V])},
    ),
    "fuse columns": ({"a": Q[:, :2], "b": Q[:, 2:]}, [fuse(["a", "b"], "c", dim=-1)], {"c": Q}),
    "split": ({"gate_up": Q}, [split("gate_up", ["gate", "up"])], {"gate": Q[:4], "up": Q[4:]}),
    "split by sizes": (
        {"x": Q},
        [split("x", ["a", "b", "c"], 1, [1, 2, 3])],
        {"a": Q[:, :1], "b": Q[:, 1:3], "c": Q[:, 3:]},
    ),
    "transpose": ({"fc": Q}, [transpose("fc")], {"fc": Q.t()}),
    "permute": ({"x": sample(2, 3, 4)}, [transpose("*", (2, 0, 1))], {"x": sample(2, 3, 4).permute(2, 0, 1)}),
    "cast to the receiver's": (
        {"a": Q, "n": torch.arange(5), "b": Q.double()},
        [cast()],
        {"a": Q.bfloat16(), "n": torch.arange(5), "b": Q},
    ),
    "cast by name": ({"a": torch.arange(5), "b": Q}, [cast("a", torch.float32)], {"a": torch.arange(5.0), "b": Q}),
    "tie": ({"embed": Q}, [tie("head", "embed")], {"embed": Q, "head": Q}),
    "tie instead of its own": ({"head": K, "embed": Q}, [tie("head", "embed")], {"embed": Q, "head": Q}),
    "tie is not wanted": ({"embed": Q}, [tie("head", "embed")], {"embed": Q}),
    "ignore": ({"a": Q, "x.inv_freq": K}, [ignore("*.inv_freq")], {"a": Q}),
    "there and back": (
        {"q": Q, "k": K},
        [fuse(["q", "k"], "qk"), transpose("qk"), split("qk", ["q", "k"], 1, [8, 4]), transpose("*")],
        {"q": Q, "k": K},
    ),
    "fused, then transposed, then cast": (
        {"q": Q, "k": K},
        [fuse(["q", "k"], "qk"), transpose("qk"), cast("*", torch.float16)],
        {"qk": torch.cat([Q, K]).t().half()},
    ),
}
for _dtype in QMAX:
    for _dim in (0, 1, -1, None):
        _x, _scale = quantized(ROW, _dtype, None if _dim is None else _dim % 2)
        CASES[f"quantize {_dtype} {_dim}"] = (
            {"a.weight": ROW},
            [quantize("*.weight", _dtype, "*.weight_scale", _dim)],
            {"a.weight": _x, "a.weight_scale": _scale},
        )
_whole = torch.cat([Q, K]).bfloat16()
_x, _scale = quantized(_whole, torch.int8, 0)
CASES["quantize, then transpose and split"] = (
    {"q": Q.bfloat16(), "k": K.bfloat16()},
    [fuse(["q", "k"], "x"), quantize("x", torch.int8, "s"), transpose("x"), split("x", ["a", "b"], 1, [5, 7])],
    {"a": _x[:5].t(), "b": _x[5:].t(), "s": _scale},
)
_x, _scale = quantized(ROW.t().half(), torch.float8_e4m3fn, 0)
CASES["cast and transpose, then quantize"] = (
    {"x": ROW},
    [cast("x", torch.float16), transpose("x"), quantize("x", torch.float8_e4m3fn, "s"), cast()],
    {"x": _x, "s": _scale},
)


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_torchs_operation(name: str) -> None:
    sent, rules, wanted = CASES[name]

    @settings(max_examples=6)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        sender, receiver = data.draw(layouts_of(sent)), data.draw(layouts_of(wanted))
        made = plan(sender, [receiver, whole_layout(wanted)], rules, bucket=data.draw(st.sampled_from([7, 1 << 20])))
        report = made.verify()
        assert report, str(report)
        gaps = data.draw(st.booleans())
        taken = moved(made, [held(sender, rank, sent, gaps) for rank in range(sender.world_size)], gaps)
        for rank in range(receiver.world_size):
            assert_same(receiver, rank, taken[rank], wanted)
        assert_same(whole_layout(wanted), 0, taken[-1], wanted)

    run()


@pytest.mark.parametrize("name", CASES)
def test_rules_have_a_text_form(name: str) -> None:
    rules = tuple(CASES[name][1])
    assert rules_from_text(rules_to_text(rules)) == rules


def test_rules_are_written_as_in_python() -> None:
    rules = [
        fuse(["*.q", "*.k"], "*.qk"),
        cast(),
        quantize("*", torch.int8, "*_scale"),
        rename(re.compile("a(.)"), "b*"),
        rename(re.compile("a(.)", re.IGNORECASE | re.DOTALL), "b*"),
        split("x", ["a", "b"], sizes=[1, 2]),
    ]
    names = {
        "fuse": fuse,
        "cast": cast,
        "quantize": quantize,
        "rename": rename,
        "split": split,
        "re": re,
        "torch": torch,
    }
    assert [eval(str(rule), names) for rule in rules] == rules


def test_rules_come_from_a_file(tmp_path: object) -> None:
    path = f"{tmp_path}/rules.json"
    with open(path, "w") as file:
        file.write('[["rename", "model.*", "*"], ["cast"]]')
    assert load_rules(path) == (rename("model.*", "*"), cast())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("{}", "expected a list of rules"),
        ('[["fold", "x"]]', "not a rule: ['fold', 'x']; expected a list that begins with one of rename, fuse"),
        ('[["rename", "x"]]', "not a rule: ['rename', 'x']"),
        ('[["rename", 3, "x"]]', "a pattern is text"),
        ('[["quantize", "x", {"dtype": "int9"}, "s"]]', "unknown dtype 'int9'"),
        ('[["rename", {"re": "("}, "x"]]', "a pattern is text or"),
        ('[[["rename"]]]', "not a rule: [['rename']]"),
        ('["rename"]', "not a rule: 'rename'"),
        ('[["tie", 3, "x"]]', "a name is text, got 3"),
        ('[["transpose", "x", "y"]]', "not a rule"),
        ('[["fuse", "x", "y"]]', "fuse takes a list"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        rules_from_text(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda: rename("x.*", "*"), 'rename("x.*", "*"): "x.*" matches no tensor; there are a.w, b.w, n'),
        (lambda: rename("*.w", "w"), "two tensors would be called w"),
        (lambda: rename("*.w", "*.*"), "'*.*' has 2 stars, but \"*.w\" only 1"),
        (lambda: rename("a.w", "b.w"), "two tensors would be called b.w"),
        (lambda: rename(re.compile("a(.w)"), r"\2"), "asks for group 2, but re.compile('a(.w)') has 1"),
        (lambda: fuse(["a.w", "b.w"], "c"), "parts of [8, 6] and [5, 7] cannot be joined in dim 0"),
        (lambda: fuse(["*.w", "*.z"], "c"), '"*.z" matches no tensor'),
        (lambda: fuse(["*.w", "a.w"], "*.c"), "has no part"),
        (lambda: fuse(["a.w", "n"], "c"), "cannot be joined"),
        (lambda: split("a.w", ["x", "y", "z"]), "a.w has 8 elements in dim 0, not 3 equal parts: give sizes="),
        (lambda: split("a.w", ["x", "y"], sizes=[3, 4]), "not parts of 3 + 4"),
        (lambda: split("a.w", ["x", "y"], 5), "has shape [8, 6] and no dim 5"),
        (lambda: transpose("n"), "n has shape [5]: dims must name each of its dims once"),
        (lambda: quantize("n", torch.int8, "s"), "n is int64: only floating tensors have scales"),
        (lambda: tie("c", "d"), '"d" matches no tensor'),
        (lambda: ignore("zz"), '"zz" matches no tensor'),
        (
            lambda: ignore("*"),
            'ignore("*"): nothing is left to update: the sender has a.w, b.w, n, the receiver has a.w',
        ),
    ],
)
def test_a_rule_that_does_not_suit_is_named(rule: Callable[[], Rule], words: str) -> None:
    layout = whole_layout({"a.w": Q, "b.w": ROW, "n": torch.arange(5)})
    with pytest.raises(UsageError) as caught:
        plan(layout, layout, [rule()])
    assert words in str(caught.value)


def test_arguments_are_checked_at_once() -> None:
    with pytest.raises(UsageError, match=r"quantize to torch\.int16: expected one of torch\.int8"):
        quantize("x", torch.int16, "s")
    with pytest.raises(UsageError, match="a pattern is text"):
        ignore(3)  # type: ignore[arg-type]
    for call in (
        lambda: rename("a", "*"),
        lambda: fuse(["a", "*"], "*"),
        lambda: split("a", ["*"]),
        lambda: tie("*", "a"),
        lambda: quantize("a", torch.int8, "*.scale"),
    ):
        with pytest.raises(UsageError, match=r"1 stars, but \"a\" only 0"):
            call()


def test_ignore_may_name_what_only_the_receiver_has() -> None:
    made = plan(whole_layout({"a": Q}), whole_layout({"a": Q, "b": K}), [ignore("b")])
    assert made.nbytes == 8 * 6 * 4


def test_rules_that_leave_nothing_to_update_are_named() -> None:
    sender, receiver = whole_layout({"a": Q}), whole_layout({"b": K})
    words = 'ignore("a"), ignore("b"): nothing is left to update: the sender has a, the receiver has b: '
    with pytest.raises(UsageError, match=re.escape(words)):
        plan(sender, receiver, [ignore("a"), ignore("b")])
    for each in (sender, receiver):
        with pytest.raises(UsageError, match="nothing is left to update"):
            plan(each, whole_layout({}), [ignore("*")])
    assert plan(whole_layout({}), whole_layout({})).nbytes == 0  # nobody has asked for that to be left out


def test_less_travels_when_it_is_quantised_at_the_sender() -> None:
    wanted = {"x": torch.empty(1000, 1000, dtype=torch.int8), "s": torch.empty(1000, 1)}
    made = plan(whole_layout({"x": torch.empty(1000, 1000)}), whole_layout(wanted), [quantize("x", torch.int8, "s")])
    assert made.nbytes == 1_000_000 + 4000

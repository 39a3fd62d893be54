"""Plans run in one process: every chunk packed by its source, unpacked by its targets; and what should come of it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from unisono.weights import Layout, Plan, Shard
from unisono.weights.checksum import Checker, own_blocks
from unisono.weights.layout import TensorLayout
from unisono.weights.packing import Packer, Unpacker
from unisono.weights.scales import local_maxima, scales_of

Named = dict[str, Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)


def whole_layout(whole: Mapping[str, Tensor]) -> Layout:
    """One rank that holds all."""
    tensors = {name: TensorLayout(tuple(t.shape), t.dtype, ((),)) for name, t in whole.items()}
    return Layout(1, tensors).split(1)


def numbers(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Whole numbers from -50 to 50, or from 0, exact in every dtype."""
    made = torch.randint(0, 101, tuple(shape), generator=torch.Generator().manual_seed(seed))
    if dtype == torch.bool:
        return made % 2 == 0
    return made.to(dtype) if dtype == torch.uint8 else (made - 50).to(dtype)


def strided(like: Tensor) -> Tensor:
    """An empty tensor of the same shape with gaps between its elements, its dims in memory backwards."""
    if not like.dim():
        return torch.empty(3, dtype=like.dtype)[1]
    return torch.empty([2 * n for n in reversed(like.shape)], dtype=like.dtype)[
        (slice(None, None, 2),) * like.dim()
    ].permute(tuple(reversed(range(like.dim()))))


def held(layout: Layout, rank: int, whole: Mapping[str, Tensor], gaps: bool = False) -> Named:
    """A rank's own tensors of the whole ones, put together box by box."""
    own: Named = {}
    for name in layout:
        if name in layout.ties:
            own[name] = own[layout.ties[name]]
            continue
        part = layout[name].parts[rank]
        if not part:
            continue
        ends = [[a + n for a, n in zip(box.at, box.shape, strict=True)] for box in part]
        mine = torch.zeros([max(column) for column in zip(*ends, strict=True)], dtype=layout[name].dtype)
        mine = strided(mine) if gaps else mine
        for offsets, length, at in part:
            mine[_index(at, length)] = whole[name][_index(offsets, length)]
        own[name] = mine
    return own


def _index(offsets: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(offsets, shape, strict=True))


def blank(layout: Layout, rank: int, gaps: bool = False) -> Named:
    """A rank's own tensors with other bytes in them."""
    return held(layout, rank, {n: numbers(layout[n].shape, layout[n].dtype, 99) for n in layout}, gaps)


def moved(plan: Plan, sent: Sequence[Named], gaps: bool = False) -> list[Named]:
    """The receivers' tensors after the plan has run over the senders'; the checksums of both ways are compared."""
    scales: Named = {}
    for fit in plan.fits:
        every = [local_maxima(fit, plan.sender, rank, own) for rank, own in enumerate(sent)]
        scales |= scales_of(fit, torch.stack(every).amax(0))
    places = [(layout, rank) for layout in plan.receivers for rank in range(layout.world_size)]
    taken = [blank(layout, rank, gaps) for layout, rank in places]
    expected: list[dict[str, int]] = [{} for _ in places]
    for number, chunk in enumerate(plan.chunks):
        data = torch.full((chunk.nbytes,), 77, dtype=torch.uint8)
        words = torch.zeros(len(chunk.pieces), dtype=torch.int64)
        each = range(0, words.nbytes, 8)
        Packer(plan.moves(chunk.source, number), sent[chunk.source], scales, each).pack(data, words.data_ptr())
        for target in chunk.targets:
            own = taken[target - len(sent)]
            landed = torch.zeros_like(words)
            Unpacker(plan.moves(target, number), own, each).unpack(data, landed.data_ptr())
            assert landed.equal(words)
            for (name, *_), value in zip(chunk.pieces, words.tolist(), strict=True):
                expected[target - len(sent)][name] = (expected[target - len(sent)].get(name, 0) + value) % (1 << 64)
    for (layout, rank), own, wanted in zip(places, taken, expected, strict=True):
        assert Checker(own_blocks(layout, rank, {n: t for n, t in own.items() if n in wanted})).sums() == wanted
    return taken


def assert_same(layout: Layout, rank: int, own: Named, whole: Mapping[str, Tensor]) -> None:
    """A rank's tensors are those of the whole, bit for bit."""
    for name, wanted in held(layout, rank, whole).items():
        assert own[name].dtype == wanted.dtype
        assert bits(own[name]) == bits(wanted), name


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor, in the order of its dims."""
    return (
        tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()
        if tensor.numel()
        else b""
    )


@st.composite
def wholes(draw: Any, dtypes: Sequence[torch.dtype] = DTYPES) -> Named:
    """A few tensors of 0 to 3 dims, some without elements."""
    shapes = draw(st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=4))
    kinds = draw(st.lists(st.sampled_from(dtypes), min_size=len(shapes), max_size=len(shapes)))
    pairs = enumerate(zip(shapes, kinds, strict=True))
    return {f"layers.{i}.weight": numbers(shape, dtype, i) for i, (shape, dtype) in pairs}


@st.composite
def layouts_of(draw: Any, whole: Mapping[str, Tensor]) -> Layout:
    """These tensors over 1 to 4 ranks: whole, rows, columns, blocks side by side, or a mesh of two cuts."""
    ranks = draw(st.integers(1, 4))
    base = whole_layout(whole)
    if draw(st.booleans()) and ranks == 4:
        return mesh_of(base, draw(st.integers(0, 2)), draw(st.integers(0, 2)))
    shard = {}
    for name, tensor in base.tensors.items():
        if tensor.shape and draw(st.booleans()):
            dim = draw(st.integers(0, len(tensor.shape) - 1))
            first = draw(st.integers(0, tensor.shape[dim]))
            shard[name] = draw(st.sampled_from([Shard(dim), Shard(dim, (first, tensor.shape[dim] - first))]))
    return base.split(ranks, shard)


def mesh_of(base: Layout, a: int, b: int) -> Layout:
    """Over a mesh of 2 x 2: dim `a` cut by the first axis, then `b` by the second; a dim that is not there: whole."""
    tensors = {}
    for name, tensor in base.tensors.items():
        rows = base.split(2, {name: a})[name].parts
        parts = []
        for outer in range(2):
            for inner in range(2):
                boxes = []
                for box in rows[outer]:
                    piece = TensorLayout(box.shape, tensor.dtype, ((),))
                    for offsets, shape, at in Layout(1, {name: piece}).split(2, {name: b})[name].parts[inner]:
                        boxes.append(type(box)(tuple(map(sum, zip(box.offsets, offsets, strict=True))), shape, at))
                parts.append(tuple(boxes))
        tensors[name] = TensorLayout(tensor.shape, tensor.dtype, tuple(parts))
    return Layout(4, tensors)

"""Plans run in one process: every chunk packed by its source, unpacked by its targets; and what should come of it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.weights import Layout, Plan
from unisono.weights.packing import Packer, Unpacker
from unisono.weights.scales import local_maxima, scales_of

Named = dict[str, Tensor]


def held(layout: Layout, rank: int, whole: Mapping[str, Tensor], strided: bool = False) -> Named:
    """A rank's own tensors of the whole ones, put together box by box."""
    own = {}
    for name in layout:
        if (first := layout.ties.get(name)) is not None:
            own[name] = own[first]
            continue
        part = layout[name].parts[rank]
        if not part:
            continue
        ends = [[a + n for a, n in zip(box.at, box.shape, strict=True)] for box in part]
        shape = [max(column) for column in zip(*ends, strict=True)]
        mine = torch.zeros(shape, dtype=layout[name].dtype)
        if strided and shape:
            mine = torch.zeros([*shape[:-1], 2 * shape[-1]], dtype=layout[name].dtype)[..., ::2]
        for offsets, length, at in part:
            mine[_index(at, length)] = whole[name][_index(offsets, length)]
        own[name] = mine
    return own


def _index(offsets: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(offsets, shape, strict=True))


def moved(plan: Plan, sent: Sequence[Named], blank: Sequence[Named]) -> list[Named]:
    """The receivers' tensors after the plan has run over the senders'."""
    scales = {}
    for fit in plan.fits:
        every = [local_maxima(fit, plan.sender, rank, own) for rank, own in enumerate(sent)]
        scales |= scales_of(fit, torch.stack(every).amax(0))
    senders = len(sent)
    bytes_of = {}
    for number, chunk in enumerate(plan.chunks):
        data = bytes_of[number] = torch.empty(chunk.nbytes, dtype=torch.uint8)
        Packer(plan.moves(chunk.source, number), sent[chunk.source], scales).pack(data)
        for target in chunk.targets:
            Unpacker(plan.moves(target, number), blank[target - senders]).unpack(data)
    return list(blank)

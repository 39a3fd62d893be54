"""The points of the contract that are tried, as streams of cases per operation.

The full product of dtypes, ops, layouts, roots, sizes, modes and groups has millions of points. Each stream below walks
one or two axes in full and rotates the others, so that every value of every axis meets every operation, and every
reduce op meets every dtype it means something on.
"""

import itertools
from collections.abc import Iterator

import torch

from contract.layouts import LAYOUTS
from contract.operations import REDUCING
from contract.seat import MODES, Case
from contract.values import DTYPES, OPS, REDUCIBLE

__all__ = ["MANY", "STREAMS", "circles"]

SHAPES = ((7,), (3, 5), (), (1,), (0,), (1000,), (2, 3, 4), (4, 0))
KiB, MiB = 1 << 10, 1 << 20
BOUNDARIES = (4 * KiB, 8 * KiB, 16 * KiB, 64 * KiB, 256 * KiB, MiB)
MANY = 3  # ranks, above which a case takes so long on few cores that the axes are walked with fewer shapes and roots
IN_PLACE = ("broadcast", "all_reduce", "reduce", "barrier")


def dtypes(operation: str, world_size: int) -> Iterator[Case]:
    """Every dtype; for reductions every reduce op on every dtype it means something on."""
    pairs = [("", dtype) for dtype in DTYPES]
    if operation in REDUCING:
        pairs = [(op, dtype) for op in OPS for dtype in REDUCIBLE[op]]
    layouts = list(LAYOUTS)
    for seed, (op, dtype) in enumerate(pairs):
        if operation == "all_reduce" and op == "PRODUCT" and dtype.is_complex:
            continue  # torch refuses it before any backend is asked
        for shape in (SHAPES[seed % len(SHAPES)], (129,))[: 1 if world_size > MANY else 2]:
            yield Case(
                dtype=dtype,
                op=op,
                shape=shape,
                layout=layouts[seed % len(layouts)],
                result_layout=layouts[seed // 2 % len(layouts)],
                root=seed % world_size,
                mode=MODES[seed % len(MODES)],
                form=seed % 2,
                seed=seed,
            )


def layouts(operation: str, world_size: int) -> Iterator[Case]:
    """Every layout of inputs with every layout of results, for one, two and three dimensions."""
    inputs = list(LAYOUTS) if operation in IN_PLACE else [*LAYOUTS, "expanded"]
    results = ["contiguous"] if operation in IN_PLACE else list(LAYOUTS)
    shapes = ((6,), (4, 3), (2, 3, 4), (65, 64))[:: 2 if world_size > MANY else 1]
    for seed, (layout, result, shape) in enumerate(itertools.product(inputs, results, shapes)):
        yield Case(
            dtype=(torch.float32, torch.int64, torch.bfloat16)[seed % 3],
            op="SUM" if operation in REDUCING else "",
            shape=shape,
            layout=layout,
            result_layout=result,
            root=seed % world_size,
            form=seed // 2 % 2,
            seed=seed,
        )


def sizes(operation: str, world_size: int) -> Iterator[Case]:
    """Sizes at, just below and just above those where a staging area may end, and a few MiB."""
    counts = [1, 2, 3, 1000, 1023, 1025]
    largest = 64 * KiB if world_size > 4 else MiB
    for boundary in BOUNDARIES:
        if boundary <= largest:
            counts += [boundary // 4 - 1, boundary // 4, boundary // 4 + 1]
    counts += {2: [3 * MiB // 4 + 1, 5 * MiB // 4], 3: [MiB // 2 + 3]}.get(world_size, [])
    for seed, count in enumerate(counts):
        yield Case(
            dtype=torch.float32,
            op="SUM" if operation in REDUCING else "",
            shape=(count,),
            root=seed % world_size,
            mode=MODES[seed % len(MODES)],
            seed=seed,
        )
    for seed, count in enumerate((4 * KiB + 1, 64 * KiB - 1, 64 * KiB + 1)):
        op = "MAX" if operation in REDUCING else ""
        yield Case(dtype=torch.uint8, op=op, shape=(count,), root=seed % world_size, layout="column", seed=seed)


def modes(operation: str, world_size: int) -> Iterator[Case]:
    """Every way to wait, at every root, small and beyond the smallest staging area."""
    roots = (0, world_size - 1) if world_size > MANY else range(world_size)
    points = itertools.product(MODES, roots, ((5,), (3, 3000)))
    for seed, (mode, root, shape) in enumerate(points):
        op = "SUM" if operation in REDUCING else ""
        yield Case(op=op, shape=shape, root=root, mode=mode, form=seed % 2, seed=seed)


def groups(operation: str, size: int) -> Iterator[Case]:
    """What every subgroup is tried with: every root, named as a global and as a group rank."""
    for root, seed in itertools.product(range(size), (0, 1)):
        op = "SUM" if operation in REDUCING else ""
        yield Case(dtype=torch.int32, op=op, shape=(4, 5), root=root, form=seed, mode=MODES[root % 2], seed=seed)


STREAMS = {stream.__name__: stream for stream in (dtypes, layouts, sizes, modes, groups)}


def circles(world_size: int) -> list[list[int]]:
    """Return the members of the subgroups tried at that world size: nested, overlapping, of one, of all."""
    everyone = list(range(world_size))
    candidates = [everyone, everyone[1:], everyone[:-1], everyone[::2], everyone[1::2], everyone[-1:], everyone[1:3]]
    return [list(members) for members in dict.fromkeys(tuple(members) for members in candidates) if members]

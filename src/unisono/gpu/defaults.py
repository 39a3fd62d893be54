"""Which kernel serves which call on GPUs, by facts that are equal on all ranks; what no row serves goes to NCCL.

Sizes and launches come from measurements on 2 and 4 H200 over NVLink (docs/gpu.md). Above the sizes of the table
kernels are faster than NCCL alone, but take more multiprocessors from what computes beside them; and an asynchronous
all_reduce of a training step, which runs on the current stream, would hold up the backward pass.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from unisono.gpu.layout import MESSAGE_ROWS, ROWS, SLOT_NBYTES, WORLD_SIZE_MAX, slot_numel
from unisono.selection import BY_DEFAULT, Row

__all__ = [
    "KIB", "LAUNCHES", "MESSAGE_NBYTES", "MESSAGE_TILES", "MIB", "NCCL", "TABLE", "GpuDefault", "LaunchShape",
    "gpu_default", "launch_shape", "message_rows", "message_shape", "tuned_table",
]  # fmt: skip

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class GpuDefault:
    """A row: a collective of up to ``upto`` bytes, of the whole tensor (all_gather: of the output), by a schedule.

    ``upto_ranks``: the most ranks the row serves. An empty schedule stands for NCCL.
    """

    collective: str
    upto: int
    schedule: str
    upto_ranks: int = WORLD_SIZE_MAX


TABLE = (
    GpuDefault("all_reduce", 1 * MIB, "one_shot", 2),
    GpuDefault("all_reduce", 512 * KIB, "one_shot", 4),
    GpuDefault("all_reduce", 256 * KIB, "one_shot"),
    GpuDefault("all_reduce", 16 * MIB, "two_phase"),
    GpuDefault("all_gather", 32 * MIB, "direct"),
    GpuDefault("reduce_scatter", 32 * MIB, "direct"),
    GpuDefault("all_to_all", 32 * MIB, "direct"),
    GpuDefault("broadcast", 8 * MIB, "star", 2),
    GpuDefault("broadcast", 2 * MIB, "star"),
    GpuDefault("reduce", 8 * MIB, "star", 2),
    GpuDefault("reduce", 512 * KIB, "star"),
    GpuDefault("reduce", 8 * MIB, "two_phase"),
    GpuDefault("gather", 8 * MIB, "star"),
    GpuDefault("scatter", 8 * MIB, "star"),
)
"""The first row that fits counts. Rows for more than 4 ranks are not measured, nor those of reduce, gather, scatter."""


MESSAGE_NBYTES = 8 * MIB
"""Bytes of a message, at most, that goes by a kernel. On 2 GPUs NCCL is faster from 16 MiB on."""


NCCL = "nccl"
"""In an algorithm's place, in what `unisono tune` measures."""
_CLEARLY = 1.03  # times as fast: less is noise, and changes no choice


@lru_cache(maxsize=4096)
def gpu_default(collective: str, nbytes: int, world_size: int, table: tuple[GpuDefault, ...] = TABLE) -> str:
    """The schedule of a call whose whole tensor has ``nbytes``; empty if it goes to NCCL."""
    for row in table:
        if row.collective == collective and nbytes <= row.upto and world_size <= row.upto_ranks:
            return row.schedule
    return ""


def tuned_table(measured: Iterable[Row], world_size: int) -> tuple[GpuDefault, ...]:
    """The table by what `unisono tune --device cuda` has measured with so many ranks: the fastest at each size.

    A neighbour's choice is kept where nothing else is clearly faster, or something at one size alone. The rows of
    `TABLE` count for collectives of which NCCL or kernels were not measured, and for calls larger than all that were,
    unless NCCL is the fastest at the last size.
    """
    times: dict[str, dict[int, dict[str, float]]] = {}
    for row in measured:
        if (row.device, row.ranks) == ("cuda", world_size) and row.algorithm != BY_DEFAULT:
            times.setdefault(row.collective, {}).setdefault(row.nbytes, {})[row.algorithm] = row.seconds
    table: list[GpuDefault] = []
    for collective in dict.fromkeys(row.collective for row in TABLE):
        sizes = {size: by for size, by in times.get(collective, {}).items() if NCCL in by and len(by) > 1}
        rows, most = _borders(collective, sizes), max(sizes, default=0)
        above = [row for row in TABLE if row.collective == collective and row.upto > most]
        if rows and not rows[-1].schedule:
            above = []
        elif rows and above and above[0].schedule == rows[-1].schedule:
            rows.pop()
        table += [*rows, *above]
    return tuple(table)


def _fastest(seconds: dict[str, float]) -> str:
    return min(seconds, key=lambda name: seconds[name])


def _borders(collective: str, sizes: dict[int, dict[str, float]]) -> list[GpuDefault]:
    """A row for each run of sizes with the same choice."""
    rows: list[GpuDefault] = []
    before, ordered = "", sorted(sizes.items())
    for k, (nbytes, seconds) in enumerate(ordered):
        best = _fastest(seconds)
        again = k + 1 < len(ordered) and _fastest(ordered[k + 1][1]) == before
        kept = before in seconds and (again or seconds[before] <= _CLEARLY * seconds[best])
        choice = before if kept else best
        if choice == before:
            rows.pop()
        rows.append(GpuDefault(collective, nbytes, "" if choice == NCCL else choice))
        before = choice
    return rows


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """Elements of a tile, warps of a block, blocks; ``one_tile``: no block has more than one."""

    tile: int
    warps: int
    blocks: int
    one_tile: bool


LAUNCHES = ((32 * KIB, 2 * KIB, 4), (128 * KIB, 4 * KIB, 8), (4 * MIB, 16 * KIB, 16), (1 << 62, 32 * KIB, 16))
"""Rows: up to so many bytes of a chunk, tiles of so many bytes by so many warps."""
_WIDE_SLOTS = 2  # of a half, at most, in tiles of more than 16 KiB: more values do not fit into registers


def launch_shape(part: int, itemsize: int, slots: int, multiprocessors: int) -> LaunchShape:
    """The launch for chunks of ``part`` elements; ``slots``: of a half. Blocks wait for their peers' blocks of the same
    number, so that all must be on the GPU at once: there are no more than multiprocessors, which hold two of 16 warps.
    """
    nbytes, warps = next((nbytes, warps) for upto, nbytes, warps in LAUNCHES if part * itemsize <= upto)
    if slots > _WIDE_SLOTS:
        nbytes = min(nbytes, 16 * KIB)
    tile = min(slot_numel(slots, itemsize), nbytes // itemsize)
    tiles = max(1, -(-part // tile))
    blocks = min(tiles, ROWS, multiprocessors)
    return LaunchShape(tile, warps, blocks, blocks == tiles)


MESSAGE_TILES = tuple(dict.fromkeys((min(tile, SLOT_NBYTES), warps) for _, tile, warps in LAUNCHES))
"""Bytes and warps of the tiles of messages."""


def message_rows(world_size: int, multiprocessors: int) -> int:
    """Rows of a message. Kernels of all peers and both directions may wait at once, beside one of a collective: with
    as many blocks as there are multiprocessors, which hold two of 16 warps each, all of them are on the GPU.
    """
    return max(1, min(MESSAGE_ROWS, multiprocessors // max(2, 2 * (world_size - 1))))


@lru_cache(maxsize=4096)
def message_shape(nbytes: int, rows: int) -> tuple[int, int, int]:
    """Bytes of a tile, warps and blocks of a message, equal at both of its ends."""
    tile, warps = next((min(tile, SLOT_NBYTES), warps) for upto, tile, warps in LAUNCHES if nbytes <= upto)
    return tile, warps, min(rows, -(-nbytes // tile))

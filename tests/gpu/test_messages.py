"""Messages between GPUs, without any: the kernel's text, executed with ranks and blocks interleaved; sizes."""

import random
from typing import Any

import pytest
import torch

from gpu.device import Device, Stuck, Unstaged
from unisono.gpu.compile import HOPPER, Kernel, compiled, triton_missing
from unisono.gpu.defaults import LAUNCHES, MESSAGE_NBYTES, message_rows, message_shape
from unisono.gpu.layout import (
    FLAGS,
    INBOX,
    MESSAGE_ROWS,
    NBYTES,
    ROWS,
    SENT,
    SLOT_NBYTES,
    SLOTS,
    STAGE,
    TAKEN,
    WORLD_SIZE_MAX,
)  # fmt: skip
from unisono.gpu.message_text import ARGUMENTS, KERNEL, MESSAGE_MODULE
from unisono.gpu.messages import MessageKernels, Side, header_of

TILE = 16  # words


class Traffic:
    """Random messages between ranks, each direction of a pair a stream, some launches a send and a receive at once."""

    def __init__(self, n: int, chance: random.Random) -> None:
        self.n, self.chance = n, chance
        self.streams: dict[tuple[str, int, int], list[tuple[Any, Any]]] = {}
        self.sent: list[torch.Tensor] = []
        self.received: list[tuple[torch.Tensor, int]] = []

    def add(self, source: int, target: int) -> tuple[Any, Any]:
        """The two sides of a message."""
        nbytes = self.chance.choice((1, 8, 15, 16, 17, 100, 128, 129, 500, 1000, 1024))
        tiles = -(-nbytes // (8 * TILE))
        data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        header, blocks = self.chance.randrange(-(1 << 31), 1 << 31), min(self.chance.choice((1, 2, 3)), tiles)
        x = torch.zeros(-(-nbytes // 8) * 8, dtype=torch.uint8)
        x[:nbytes] = data
        out = torch.full_like(x, 77)
        self.sent.append(data)
        self.received.append((out, nbytes))
        facts = (nbytes, header)
        return (x.view(torch.int64), *facts, target, blocks), (out.view(torch.int64), *facts, source, blocks)

    def message(self, source: int, target: int) -> None:
        """Each end on its own stream."""
        sent, received = self.add(source, target)
        self.streams.setdefault(("send", source, target), []).append((sent, None))
        self.streams.setdefault(("recv", target, source), []).append((None, received))

    def wrong(self) -> int:
        """Messages that came otherwise than they were sent, or wrote beside their tensors."""
        rows = zip(self.sent, self.received, strict=True)
        return sum(not torch.equal(out[:k], data) or bool((out[k:] != 77).any()) for data, (out, k) in rows)

    def run(self, waits: bool = True, text: str = MESSAGE_MODULE) -> int:
        """The number of wrong ones."""
        device = Device(text, self.n, self.chance)
        device.waits = waits
        device.run_messages([(rank, launches) for (_, rank, _), launches in self.streams.items()], TILE)
        return self.wrong()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_messages_in_all_directions_at_once(n: int) -> None:
    for seed in range(6):
        traffic = Traffic(n, random.Random(seed))
        for _ in range(40):
            traffic.message(traffic.chance.randrange(n), traffic.chance.randrange(n))
        assert traffic.run() == 0


@pytest.mark.parametrize("n", [1, 2, 4])
def test_rings_in_one_launch(n: int) -> None:
    """Every rank sends to the next and receives from the one before, ten times: a launch each."""
    for seed in range(3):
        traffic = Traffic(n, random.Random(seed))
        for _ in range(10):
            sides = [traffic.add(rank, (rank + 1) % n) for rank in range(n)]
            for rank in range(n):
                traffic.streams.setdefault(("both", rank, 0), []).append((sides[rank][0], sides[rank - 1][1]))
        assert traffic.run() == 0


def test_a_sender_runs_ahead_by_its_slots() -> None:
    """Without a receive it ends, as long as each row has a slot left; a tile more waits."""
    for more in (0, 1):
        traffic = Traffic(2, random.Random(1))
        for _ in range(SLOTS + more):
            sent, _ = traffic.add(0, 1)
            traffic.streams.setdefault(("send", 0, 1), []).append(((sent[0][:1], 8, 5, 1, 1), None))
        if more:
            with pytest.raises(Stuck):
                traffic.run()
        else:
            traffic.run()


def test_a_wait_left_out_is_found() -> None:
    """What the interleavings are worth."""
    found = 0
    for seed in range(6):
        traffic = Traffic(2, random.Random(seed))
        for _ in range(12):
            traffic.message(0, 1)
        try:
            found += traffic.run(waits=False)
        except Unstaged:
            found += 1
    assert found


def test_a_slot_filled_before_it_was_taken_is_found() -> None:
    waiting = "await_one(bases, mine, taken_line(row), taken, record, limit, peer, world_size)"
    assert waiting in MESSAGE_MODULE
    traffic = Traffic(2, random.Random(1))
    for _ in range(60):
        traffic.message(0, 1)
    with pytest.raises(AssertionError, match="a tile was overwritten before it was taken"):
        traffic.run(text=MESSAGE_MODULE.replace(waiting, "pass"))


def test_a_message_of_another_header_is_found() -> None:
    traffic = Traffic(2, random.Random(3))
    traffic.message(0, 1)
    ((_, received),) = traffic.streams["recv", 1, 0]
    traffic.streams["recv", 1, 0] = [(None, (*received[:2], received[2] ^ 1, *received[3:]))]
    with pytest.raises(AssertionError, match="the flag of another message"):
        traffic.run()


# Sizes.


def test_the_workspace_holds_messages_beside_the_rest() -> None:
    line = 8 * WORLD_SIZE_MAX
    assert FLAGS + 2 * ROWS * line <= SENT
    assert SENT + SLOTS * MESSAGE_ROWS * line <= TAKEN
    assert TAKEN + MESSAGE_ROWS * line <= STAGE < INBOX < NBYTES
    assert SLOTS & (SLOTS - 1) == 0
    assert all(tile <= SLOT_NBYTES for _, tile, _ in LAUNCHES)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_all_blocks_fit_on_a_gpu(n: int) -> None:
    for multiprocessors in (20, 132):
        rows = message_rows(n, multiprocessors)
        assert 0 < rows <= MESSAGE_ROWS
        assert 2 * (n - 1) * rows <= multiprocessors
        for nbytes in (1, 4096, 100_000, MESSAGE_NBYTES):
            tile, warps, blocks = message_shape(nbytes, rows)
            assert (tile, warps) in [(tile, warps) for _, tile, warps in LAUNCHES]
            assert 1 <= blocks <= rows


def test_headers_differ_with_dtype_size_and_tag() -> None:
    found = [
        header_of("float32", 4, 0),
        header_of("int32", 4, 0),
        header_of("float32", 5, 0),
        header_of("float32", 4, -1),
    ]
    assert len(set(found)) == 4
    assert all(-(1 << 31) <= header < 1 << 31 for header in found)


def test_a_launch_is_of_the_sizes_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "unisono.gpu.messages._loaded",
        lambda tile, warps: lambda grid, stream, rest: calls.append((tile, grid, stream, *rest)),
    )

    class Space:
        bases, counters, record, multiprocessors = 10, 11, 12, 132

    kernels: Any = MessageKernels(Space(), 1, 2, 132, 2.0)  # type: ignore[arg-type]
    kernels.launch(7, Side(4096, 5000, 3, 0), None)
    kernels.launch(7, Side(4096, 1 << 20, 3, 0), Side(8192, 1 << 20, 4, 0))
    fixed = (10, 11, 12, 1, 2, 2_000_000_000)
    assert calls[0] == (2048, 3, 7, 4096, 5000, 3, 0, 3, 0, 0, 0, 0, 0, *fixed)
    assert calls[1] == (16384, 128, 7, 4096, 1 << 20, 3, 0, 64, 8192, 1 << 20, 4, 0, 64, *fixed)
    assert len(calls[1]) - 3 == len(ARGUMENTS)
    assert kernels.alike(1, 2000)
    assert not kernels.alike(1, 1 << 20)


@pytest.mark.skipif(bool(triton_missing()), reason=triton_missing() or "-")
@pytest.mark.parametrize(("tile", "warps"), [row[1:] for row in LAUNCHES])
def test_accesses_are_wide(tile: int, warps: int) -> None:
    text = str(compiled(Kernel(KERNEL, MESSAGE_MODULE, "int64", tile // 8, warps), HOPPER).asm["ptx"])
    each = tile // (16 * 32 * warps)
    assert text.count("st.global.v2.b64") == 2 * each
    assert text.count("ld.global.v2.b64") == text.count("ld.global.cg.v2.b64") == each
    assert "ld.shared" not in text
    assert text.count("st.release.sys.global.u64") == text.count("ld.acquire.sys.global.u64") == 2

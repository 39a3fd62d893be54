"""Messages between GPUs, without any: the kernel's text, executed with ranks and blocks interleaved; sizes."""

import random
from typing import Any

import pytest
import torch

from gpu.device import Device, Launch, Stuck, Unstaged
from unisono.gpu.compile import HOPPER, Kernel, compiled, triton_missing
from unisono.gpu.defaults import MESSAGE_NBYTES, MESSAGE_TILES, message_rows, message_shape
from unisono.gpu.kernels import KernelCalls
from unisono.gpu.layout import (
    FLAGS,
    INBOX,
    MESSAGE_ROWS,
    ROWS,
    SENT,
    SLOT_NBYTES,
    SLOTS,
    STAGE,
    TAKEN,
    WORLD_SIZE_MAX,
    workspace_nbytes,
)  # fmt: skip
from unisono.gpu.message_text import LAST, MESSAGE_MODULE, SIDE, SIDES, kernel_of_messages
from unisono.gpu.messages import MessageKernels, Side, header_of

TILE = 16  # words


class Space:
    """A workspace of no memory."""

    bases, counters, record, device = 10, 11, 12, torch.device("cuda", 0)


def of_rank(rank: int, n: int, limit: float) -> MessageKernels:
    return MessageKernels(KernelCalls(Space(), rank, n, 132, limit))  # type: ignore[arg-type]


@pytest.fixture
def short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 words, and up to three rows; what is launched is given back."""

    def loaded(device: int, sides: int, tile: int, warps: int) -> Any:
        return lambda blocks, stream, arguments: stream.append((kernel_of_messages(sides), TILE, blocks, arguments))

    def shape(nbytes: int, rows: int) -> tuple[int, int, int]:
        return 2048, 4, min(1 + nbytes % 3, -(-nbytes // (8 * TILE)))

    monkeypatch.setattr("unisono.gpu.messages._loaded", loaded)
    monkeypatch.setattr("unisono.gpu.messages.message_launcher", lambda launch: launch)
    monkeypatch.setattr("unisono.gpu.messages.message_shape", shape)


class Traffic:
    """Random messages between ranks, each direction of a pair a stream, or several in one launch."""

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.chance = n, random.Random(seed)
        self.kernels = [of_rank(rank, n, 1.0) for rank in range(n)]
        self.streams: dict[tuple[str, int, int], list[Launch]] = {}
        self.memory: dict[int, torch.Tensor] = {}
        self.moved: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def words(self, data: torch.Tensor) -> int:
        """The address of a copy of bytes, filled up to whole words by 77."""
        found = torch.full((-(-len(data) // 8) * 8,), 77, dtype=torch.uint8)
        found[: len(data)] = data
        address = 16 * (1 << 20) + 16 * len(self.memory)
        self.memory[address] = found.view(torch.int64)
        return address

    def add(self, source: int, target: int, nbytes: int = 0) -> tuple[Side, Side]:
        """The two sides of a message."""
        nbytes = nbytes or self.chance.choice((1, 8, 15, 16, 17, 100, 128, 129, 500, 1000, 1024))
        data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        header, out = self.chance.randrange(-(1 << 31), 1 << 31), self.words(data * 0)
        self.moved.append((data, self.memory[out].view(torch.uint8), nbytes))
        return Side(self.words(data), nbytes, header, target), Side(out, nbytes, header, source)

    def launch(self, name: str, rank: int, sends: list[Side], receives: list[Side], peer: int = 0) -> None:
        """On a stream by name, rank and peer."""
        stream: Any = self.streams.setdefault((name, rank, peer), [])
        self.kernels[rank].launch(stream, sends, receives)

    def message(self, source: int, target: int, nbytes: int = 0) -> None:
        """Each end on its own stream."""
        sent, received = self.add(source, target, nbytes)
        self.launch("send", source, [sent], [], target)
        self.launch("recv", target, [], [received], source)

    def run(self, waits: bool = True, text: str = MESSAGE_MODULE) -> int:
        """The number of messages that came otherwise than they were sent, or wrote beside their tensors."""
        device = Device(text, self.n, self.chance)
        device.waits = waits
        device.run_messages([(rank, launches) for (_, rank, _), launches in self.streams.items()], self.memory)
        return sum(not torch.equal(out[:k], data) or bool((out[k:] != 77).any()) for data, out, k in self.moved)


@pytest.mark.usefixtures("short_tiles")
class TestText:
    """The kernels' text, executed."""

    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_messages_in_all_directions_at_once(self, n: int) -> None:
        for seed in range(6):
            traffic = Traffic(n, seed)
            for _ in range(40):
                traffic.message(traffic.chance.randrange(n), traffic.chance.randrange(n))
            assert traffic.run() == 0

    @pytest.mark.parametrize("n", [1, 2, 4])
    @pytest.mark.parametrize("each", [1, 2])
    def test_rings_in_one_launch(self, n: int, each: int) -> None:
        """Every rank sends to the next and receives from the one before, ten times: a launch each."""
        for seed in range(3):
            traffic = Traffic(n, seed)
            for _ in range(10):
                sides = [[traffic.add(rank, (rank + 1) % n) for _ in range(each)] for rank in range(n)]
                for rank in range(n):
                    sends, receives = [s for s, _ in sides[rank]], [r for _, r in sides[rank - 1]]
                    traffic.launch("all", rank, sends, receives)
            assert traffic.run() == 0

    def test_a_launch_and_single_messages_meet(self) -> None:
        """Rank 0 exchanges with two peers in one launch, twice; they issue message by message."""
        for seed in range(4):
            traffic = Traffic(3, seed)
            for _ in range(6):
                there, back = ([traffic.add(*pair) for pair in pairs] for pairs in (((0, 1), (0, 2)), ((1, 0), (2, 0))))
                traffic.launch("all", 0, [sent for sent, _ in there], [received for _, received in back])
                for peer in (1, 2):
                    traffic.launch("recv", peer, [], [there[peer - 1][1]])
                    traffic.launch("send", peer, [back[peer - 1][0]], [])
            assert traffic.run() == 0

    def test_a_sender_runs_ahead_by_its_slots(self) -> None:
        """Without a receive it ends, as long as each row has a slot left; a tile more waits."""
        for more in (0, 1):
            traffic = Traffic(2, 1)
            for _ in range(SLOTS + more):
                traffic.launch("send", 0, [traffic.add(0, 1, 8)[0]], [])
            if more:
                with pytest.raises(Stuck):
                    traffic.run()
            else:
                traffic.run()

    def test_a_wait_left_out_is_found(self) -> None:
        """What the interleavings are worth."""
        found = 0
        for seed in range(6):
            traffic = Traffic(2, seed)
            for _ in range(12):
                traffic.message(0, 1)
            try:
                found += traffic.run(waits=False)
            except Unstaged:
                found += 1
        assert found

    def test_a_slot_filled_before_it_was_taken_is_found(self) -> None:
        waiting = "await_one(bases, mine, taken_line(row), taken, record, limit, peer, world_size)"
        assert waiting in MESSAGE_MODULE
        traffic = Traffic(2, 1)
        for _ in range(60):
            traffic.message(0, 1)
        with pytest.raises(AssertionError, match="a tile was overwritten before it was taken"):
            traffic.run(text=MESSAGE_MODULE.replace(waiting, "pass"))

    def test_a_message_of_another_header_is_found(self) -> None:
        traffic = Traffic(2, 3)
        sent, received = traffic.add(0, 1)
        traffic.launch("send", 0, [sent], [])
        traffic.launch("recv", 1, [], [received._replace(header=received.header ^ 1)])
        with pytest.raises(AssertionError, match="the flag of another message"):
            traffic.run()


# Sizes.


def test_the_workspace_holds_messages_beside_the_rest() -> None:
    line = 8 * WORLD_SIZE_MAX
    assert FLAGS + 2 * ROWS * line <= SENT
    assert SENT + SLOTS * MESSAGE_ROWS * line <= TAKEN
    assert TAKEN + MESSAGE_ROWS * line <= STAGE < INBOX < workspace_nbytes(1)
    assert SLOTS & (SLOTS - 1) == 0
    assert all(tile <= SLOT_NBYTES for tile, _ in MESSAGE_TILES)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_all_blocks_fit_on_a_gpu(n: int) -> None:
    for multiprocessors in (20, 132):
        rows = message_rows(n, multiprocessors)
        assert 0 < rows <= MESSAGE_ROWS
        assert 2 * (n - 1) * rows <= multiprocessors
        for nbytes in (1, 4096, 100_000, MESSAGE_NBYTES):
            tile, warps, blocks = message_shape(nbytes, rows)
            assert (tile, warps) in MESSAGE_TILES
            assert 1 <= blocks <= rows


def test_headers_differ_with_dtype_size_and_tag() -> None:
    found = [
        header_of(torch.float32, 4, 0),
        header_of(torch.int32, 4, 0),
        header_of(torch.float32, 5, 0),
        header_of(torch.float32, 4, -1),
    ]
    assert len(set(found)) == 4
    assert all(-(1 << 31) <= header < 1 << 31 for header in found)


def test_a_launch_is_of_the_sizes_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def loaded(device: int, sides: int, tile: int, warps: int) -> Any:
        return lambda blocks, stream, rest: calls.append((sides, tile, blocks, stream, *rest))

    monkeypatch.setattr("unisono.gpu.messages._loaded", loaded)
    monkeypatch.setattr("unisono.gpu.messages.message_launcher", lambda launch: launch)
    kernels = of_rank(1, 2, 2.0)
    small, large = Side(4096, 5000, 3, 0), Side(8192, 1 << 20, 4, 0)
    kernels.launch(7, [small], [])
    kernels.launch(7, [large], [large])
    kernels.launch(7, [large, large._replace(peer=1)], [large, large])
    fixed = (10, 11, 12, 1, 2, 2_000_000_000)
    none = (0,) * (1 + len(SIDE))
    assert calls[0] == (1, 2048, 3, 7, 4096, 5000, 3, 0, 0, 3, *none, *fixed)
    assert calls[1] == (1, 16384, 128, 7, 8192, 1 << 20, 4, 0, 0, 64, 8192, 1 << 20, 4, 0, 64, 64, *fixed)
    sides = [(8192, 1 << 20, 4, peer, first, 64) for peer, first in ((0, 0), (1, 64), (0, 128), (0, 128))]
    assert calls[2] == (2, 16384, 192, 7, *(number for side in sides for number in side), *fixed)
    assert len(fixed) == len(LAST)
    assert kernels.fit([1], [2000])
    assert not kernels.fit([1], [1 << 20])
    assert not kernels.fit([1, 1, 1], [])


@pytest.mark.skipif(bool(triton_missing()), reason=triton_missing() or "-")
@pytest.mark.parametrize(("tile", "warps"), MESSAGE_TILES)
@pytest.mark.parametrize("sides", SIDES)
def test_accesses_are_wide(sides: int, tile: int, warps: int) -> None:
    made = compiled(Kernel(kernel_of_messages(sides), MESSAGE_MODULE, "int64", tile // 8, warps), HOPPER)
    text, each = str(made.asm["ptx"]), sides * tile // (16 * 32 * warps)
    assert text.count("st.global.v2.b64") == 2 * each
    assert text.count("ld.global.v2.b64") == text.count("ld.global.cg.v2.b64") == each
    assert "ld.shared" not in text
    assert text.count("st.release.sys.global.u64") == text.count("ld.acquire.sys.global.u64") == 2 * sides

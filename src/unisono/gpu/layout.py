"""The layout of a rank's device workspace, which the GPUs of a group map; kernels and host both read these numbers.

A workspace is bytes at one base address per rank:

    0        the abort word, 32 bits; not 0 once any rank has given up
    FLAGS    parity of the meeting, row, source: 64 bits, the meeting's number << 32 | header
    SENT     slot, message row, source: 64 bits, the tile's number << 32 | header
    TAKEN    message row, reader: 64 bits, the number << 32 of the last tile that it has taken
    STAGE    row, parity: HALF_NBYTES of staging memory
    INBOX    source, message row, slot: SLOT_NBYTES of a message

A *row* here is what block number b of every rank uses: its counter of meetings, its flags, its two halves of staging
memory. Flags and halves follow the parity of meetings exactly as the board of shared memory does
(transport/board.py), and for the same reason: whoever passes meeting k has seen that all peers have read what was
written for meeting k - 2. So programs with slots of any size follow each other on one row.

Messages have rows of their own, counted for every ordered pair of ranks. Tile k of a row goes to slot k % SLOTS of the
reader; its sender waits until tile k - SLOTS has been taken, and so runs ahead of the reader by so many tiles a row.
"""

__all__ = [
    "COUNTERS", "FLAGS", "HALF_NBYTES", "INBOX", "MESSAGE_ROWS", "RECORD_WORDS", "ROWS", "SENT", "SLOTS", "SLOT_NBYTES",
    "STAGE", "TAKEN", "WORLD_SIZE_MAX", "slot_numel", "workspace_nbytes",
]  # fmt: skip

WORLD_SIZE_MAX = 8
ROWS = 128
"""Blocks of a launch, at most. Twice as many were 1.1 times as fast alone at 16 and 64 MiB on 2 GPUs, and slower than
NCCL beside matmuls."""
FLAGS = 4096
STAGE = 1 << 18
HALF_NBYTES = 128 << 10
MESSAGE_ROWS, SLOTS, SLOT_NBYTES = 64, 4, 16 << 10
SENT, TAKEN = 1 << 16, 1 << 17
INBOX = STAGE + ROWS * 2 * HALF_NBYTES
COUNTERS = ROWS + 2 * WORLD_SIZE_MAX * MESSAGE_ROWS
"""32-bit counters of a rank: of meetings by row; of tiles sent, then received, by peer and message row."""
RECORD_WORDS = 8
"""64-bit words of a rank's failure record, in pinned host memory: code | peer << 8; the flag that came; the flag that
was expected; what the host writes to end the kernels of this rank; four spare."""


def workspace_nbytes(world_size: int) -> int:
    """Bytes of the workspace of a rank, one of so many: an inbox for each source."""
    return INBOX + world_size * MESSAGE_ROWS * SLOTS * SLOT_NBYTES


def slot_numel(slots: int, itemsize: int) -> int:
    """Elements of a slot, a power of two, at most 16,384: what a block of threads moves of a chunk at a time."""
    room = HALF_NBYTES // (max(1, slots) * itemsize)
    return min(1 << 14, 1 << max(0, room.bit_length() - 1))

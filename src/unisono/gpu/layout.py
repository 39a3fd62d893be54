"""The layout of a rank's device workspace, which the GPUs of a group map; kernels and host both read these numbers.

A workspace is bytes at one base address per rank:

    0        the abort word, 32 bits; not 0 once any rank has given up
    FLAGS    parity of the meeting, row, source: 64 bits, the meeting's number << 32 | header
    STAGE    row, parity: HALF_NBYTES of staging memory

A *row* here is what block number b of every rank uses: its counter of meetings, its flags, its two halves of staging
memory. Flags and halves follow the parity of meetings exactly as the board of shared memory does
(transport/board.py), and for the same reason: whoever passes meeting k has seen that all peers have read what was
written for meeting k - 2. So programs with slots of any size follow each other on one row.
"""

__all__ = ["FLAGS", "HALF_NBYTES", "NBYTES", "RECORD_WORDS", "ROWS", "STAGE", "WORLD_SIZE_MAX", "slot_numel"]

WORLD_SIZE_MAX = 8
ROWS = 256
FLAGS = 4096
STAGE = 1 << 18
HALF_NBYTES = 128 << 10
NBYTES = STAGE + ROWS * 2 * HALF_NBYTES
RECORD_WORDS = 8
"""64-bit words of a rank's failure record, in pinned host memory: code | peer << 8; the flag that came; the flag that
was expected; what the host writes to end the kernels of this rank; four spare."""


def slot_numel(slots: int, itemsize: int) -> int:
    """Elements of a slot, a power of two, at most 16,384: what a block of threads moves of a chunk at a time."""
    room = HALF_NBYTES // (max(1, slots) * itemsize)
    return min(1 << 14, 1 << max(0, room.bit_length() - 1))

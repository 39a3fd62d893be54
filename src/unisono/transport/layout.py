"""The layout of the memory that the ranks of one group share. Never imports torch: `unisono ps` reads it too."""

import zlib
from dataclasses import dataclass
from functools import cached_property

__all__ = [
    "ABORTED", "ABSENT", "AFFINITY", "CALL", "COMPLETED", "COMPLETED_AT", "DEVICE_ISSUED", "EXIT_NOTE", "FIELDS",
    "GAVE_UP", "HEADER",
    "HEAP", "HEAP_NBYTES", "HEAP_NONCE", "ISSUED", "ISSUED_AT", "ISSUE_TIMES", "JOINED", "KIB", "LEFT", "LENGTH",
    "LINE", "MAGIC", "MEETINGS", "MEMORY_NAME", "MESSAGE_ERROR", "MIB", "NAME", "PAGE", "PID", "REFUSED", "SHRINKING",
    "STARTED", "STATE", "WRITING", "Layout",
]  # fmt: skip

KIB, MIB = 1 << 10, 1 << 20
LINE, PAGE = 64, 4096
MEMORY_NAME = "unisono:"
"""The memory file is called this, then the group's label."""
MAGIC = 0x31_4F4E_4F53_494E_55  # "UNISONO1", read backwards
PID, STARTED, STATE, MEETINGS, ISSUED, COMPLETED, COMPLETED_AT, HEADER, NAME, REFUSED = range(10)
"""Words of a rank's record: its process; whether it is there; meetings begun; calls issued and completed; when the last
one was (``time.monotonic_ns``); where in the segment its newest header lies; its global rank; whether a peer refused a
message of its."""
HEAP, HEAP_NBYTES, HEAP_NONCE, ABORTED, AFFINITY, DEVICE_ISSUED = range(10, 16)
"""More of them: the descriptor, plus 1, of the memory of its process's shared tensors (0: none), its bytes, the number
it begins with; the collective call that the rank has given up, counted from 1; a mark of the cores it may use; calls
issued on GPUs."""
ISSUED_AT, ISSUE_TIMES = 16, 16
"""Words ``ISSUED_AT + k % ISSUE_TIMES``: issue times of calls k, counted from 1 (``time.monotonic_ns``)."""
ABSENT, JOINED, LEFT, GAVE_UP = range(4)
"""States of a rank: not there yet; a member; gone in peace; still there, but done with this group after an error."""
CALL, EXIT_NOTE, MESSAGE_ERROR, SHRINKING = range(4)
"""Kinds of text: the call of a rank whose headers differ; how it left; how the last of its messages failed; how far it
is in the agreement on who survives."""
LENGTH, WRITING = 0xFFFF, 1 << 16
"""The word before a text: its length in bytes, a bit that is set while it is written, how often it was in the rest."""

FIELDS = (
    5  # 64-bit words before the nonce: magic, world size, the layout's `mark`, whether it is oversubscribed, one spare
)


def _up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


@dataclass(frozen=True)
class Layout:
    """Offsets, in bytes from the start; a function of the world size alone, so that all ranks agree."""

    world_size: int

    RECORD = 256  # per rank, 64-bit words: see PID and what follows
    TEXT, TEXTS = PAGE, 4 * PAGE  # per rank: what it has to say to the others, a page per kind of text
    OUTBOX = PAGE  # per rank: what it has staged for other hosts
    COUNTERS = 4  # meeting counters, used in turn
    COUNTER_LINES = 2 * LINE  # from those of even meetings to those of odd ones, no neighbours for a prefetcher
    DEVICE_CALLS = 64  # per rank: headers of its last calls on GPUs
    DEVICE_MESSAGES = 16  # per ordered pair and end: its last messages on GPUs
    DEVICE_MESSAGE = 4 * 8  # 64-bit words: number, tag, elements, dtype << 32 | checksum
    RING_CONTROL = 3 * LINE  # per ordered pair: head, tail, what the reader refused, each on its own line

    @cached_property
    def header(self) -> int:
        """Bytes of one rank's call header: sequence number, signature, two counts per rank."""
        return _up(8 + 96 + 16 * self.world_size, LINE)

    @cached_property
    def ring(self) -> int:
        """Bytes of one ring (messages from one rank to another)."""
        return max(64 * KIB, min(2 * MIB, 32 * MIB // self.world_size**2 // (64 * KIB) * (64 * KIB)))

    @cached_property
    def stage(self) -> int:
        """Bytes that a rank stages between two meetings, at most."""
        return max(128 * KIB, min(MIB, 8 * MIB // self.world_size // (64 * KIB) * (64 * KIB)))

    @cached_property
    def area(self) -> int:
        """Bytes of one rank's staging area, of which there are two: over hosts pieces of several meetings lie there."""
        return 2 * self.stage

    @cached_property
    def records(self) -> int:  # noqa: D102
        return PAGE

    @cached_property
    def texts(self) -> int:  # noqa: D102
        return _up(self.records + self.RECORD * self.world_size, PAGE)

    @cached_property
    def outboxes(self) -> int:  # noqa: D102
        return self.texts + self.TEXTS * self.world_size

    @cached_property
    def counters(self) -> int:  # noqa: D102
        return self.outboxes + self.OUTBOX * self.world_size

    def counter(self, meeting: int) -> int:
        """Where the ranks that have arrived at a meeting are counted: two counters lie in the line of a parity."""
        return self.counters + self.COUNTER_LINES * (meeting & 1) + 8 * (meeting >> 1 & 1)

    @cached_property
    def inline(self) -> int:
        """Bytes of a rank in the rest of a counters' line, for data that comes with the news of its arrival."""
        return (LINE - 8 * self.COUNTERS // 2) // self.world_size // 8 * 8

    def inline_at(self, parity: int, rank: int) -> int:
        """Where they begin."""
        return self.counter(parity) + 8 * self.COUNTERS // 2 + rank * self.inline

    @cached_property
    def bells(self) -> int:  # noqa: D102
        return self.counters + 2 * self.COUNTER_LINES

    @cached_property
    def headers(self) -> int:  # noqa: D102
        return self.bells + self.world_size * LINE

    @cached_property
    def handles(self) -> int:
        """Two lines per rank, used in turn as headers are: where its tensor lies, if peers may read it there."""
        return self.headers + 2 * self.world_size * self.header

    @cached_property
    def ring_controls(self) -> int:  # noqa: D102
        return self.handles + 2 * self.world_size * LINE

    @cached_property
    def rings(self) -> int:  # noqa: D102
        return _up(self.ring_controls + self.world_size**2 * self.RING_CONTROL, PAGE)

    @cached_property
    def stages(self) -> int:  # noqa: D102
        return self.rings + self.world_size**2 * self.ring

    @cached_property
    def device_numbers(self) -> int:
        """Per rank ``DEVICE_CALLS`` 64-bit words of the headers in `device_headers`: a number, a checksum."""
        return self.stages + 2 * self.world_size * self.area

    @cached_property
    def device_orders(self) -> int:
        """As many words: the places of those calls in the order of all calls on GPUs of their process."""
        return self.device_numbers + 8 * self.DEVICE_CALLS * self.world_size

    @cached_property
    def device_headers(self) -> int:
        """Per rank ``DEVICE_CALLS`` headers of calls on GPUs, used in turn."""
        return _up(self.device_orders + 8 * self.DEVICE_CALLS * self.world_size, LINE)

    @cached_property
    def device_messages(self) -> int:
        """Per sender, receiver and end (what was sent, what was received): how many, then the last ones by turns."""
        return _up(self.device_headers + self.DEVICE_CALLS * self.world_size * self.header, LINE)

    @cached_property
    def total(self) -> int:  # noqa: D102
        each = LINE + self.DEVICE_MESSAGES * self.DEVICE_MESSAGE
        return _up(self.device_messages + 2 * self.world_size**2 * each, PAGE)

    @cached_property
    def mark(self) -> int:
        """A digest of this layout, which differs between versions of unisono."""
        places = [getattr(self, name) for name in dir(type(self)) if not name.startswith("_") and name != "mark"]
        words = sorted((name, value) for name, value in globals().items() if isinstance(value, int))
        return zlib.crc32(repr((places, words)).encode())

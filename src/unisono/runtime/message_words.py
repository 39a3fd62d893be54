"""The 64-bit words that the loops of messages read and write. Compiled loops hold these numbers.

A control block: bytes of a ring; where the rings' data and their counts begin, bytes of the counts of one; where the
bells begin; rank and size; where `OVERSUBSCRIBED_UNTIL` of futex.py lies; how often the rings are polled before the
core is yielded; memory for a job; and, written by the loops, the count of this rank's bell before their last poll, and
what past_caches.py keeps.

A job is a message under way: whether it is sent, its peer; its head (the expected one, of a receive; 0 if only the
queue can match it), its payload (0: it is dropped) and the bytes of that; and, written by the loops, how many bytes
have moved, and whether the head has: 0, 1, or `OTHER`.
"""

from unisono.runtime.past_caches import STATE_WORDS

__all__ = [
    "BEGUN", "BELLS", "BELL_SEEN", "CAPACITY", "CONTROLS", "CONTROL_WORDS", "DATA", "HEAD", "JOB", "JOB_WORDS", "MOVED",
    "NBYTES", "NOTHING_MOVED", "OTHER", "OVERSUBSCRIBED", "PAST_CACHES", "PEER", "RANK", "RINGS", "RING_CONTROL",
    "SENDS", "SIZE", "SPINS",
]  # fmt: skip

CAPACITY, RINGS, CONTROLS, RING_CONTROL, BELLS, RANK, SIZE, OVERSUBSCRIBED, SPINS, JOB, BELL_SEEN, PAST_CACHES = range(
    12
)
CONTROL_WORDS = PAST_CACHES + STATE_WORDS
SENDS, PEER, HEAD, DATA, NBYTES, MOVED, BEGUN = range(7)
JOB_WORDS = BEGUN + 1
NOTHING_MOVED, OTHER = -1, -2
"""In place of the bytes moved: nothing has arrived, or fits; or another message than the expected one has arrived."""

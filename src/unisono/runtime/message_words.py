"""What the loops of messages are told and what they answer, in words of 64 bits. Compiled loops hold these numbers.

A control block: bytes of a ring; where the rings' data and their counts begin, bytes of the counts of one; where the
bells begin; who this is among how many; where `OVERSUBSCRIBED` of futex.py lies; how often the rings are looked at before the
core is yielded; memory for a job; and, written by the loops, this rank's bell as it was before their last look into the
rings.

A job is a message on its way: whether it is sent, to or from whom; where its head lies (what it has to be, of one that
is received; 0 if only the queue can tell) and where its payload (0: it is dropped), of how many bytes; and, written by
the loops, how many of them have moved, and whether the head has: 0, 1, or `OTHER`.
"""

__all__ = [
    "BEGUN",
    "BELLS",
    "BELL_SEEN",
    "CAPACITY",
    "CONTROLS",
    "CONTROL_WORDS",
    "DATA",
    "HEAD",
    "JOB",
    "JOB_WORDS",
    "MOVED",
    "NBYTES",
    "NOTHING_MOVED",
    "OTHER",
    "OVERSUBSCRIBED",
    "PEER",
    "RANK",
    "RINGS",
    "RING_CONTROL",
    "SENDS",
    "SIZE",
    "SPINS",
]  # fmt: skip

CAPACITY, RINGS, CONTROLS, RING_CONTROL, BELLS, RANK, SIZE, OVERSUBSCRIBED, SPINS, JOB, BELL_SEEN = range(11)
CONTROL_WORDS = BELL_SEEN + 1
SENDS, PEER, HEAD, DATA, NBYTES, MOVED, BEGUN = range(7)
JOB_WORDS = BEGUN + 1
NOTHING_MOVED, OTHER = -1, -2
"""Instead of the bytes moved: nothing has come, or can go; another message has come than the one that is expected."""

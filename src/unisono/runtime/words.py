"""The 64-bit words an interpreter reads: the control block of a rank in a group, and a prepared call.

The compiled loops hold these numbers.
"""

from unisono.runtime.past_caches import STATE_WORDS

__all__ = [
    "ABORTED", "ABORTED_AT", "ARRIVED", "BASE", "BASES", "BASES_COUNT", "BLOCK", "BOUNDS", "CALL_WORDS", "COMPLETED",
    "COMPLETED_AT", "COMPLETES", "CONTROL_WORDS", "COUNTERS", "DIFFERS", "DIRECT", "DONE", "END_TIMES", "EXCLUSIVE",
    "FIRST_MEETING", "FULL", "HANDLES", "HEADER", "HEADERS", "HEADER_AT", "HEADER_OFFSET", "INLINE", "INPUTS",
    "IN_BLOCKS", "IN_SIZES", "ISSUED", "ISSUED_AT", "ISSUED_KEPT", "ISSUE_TIMES", "ITERATION", "KEPT", "LARGE",
    "LISTED", "MAPPED", "MEETINGS_BEGUN", "ONE_WRITER", "OP", "OUTPUTS", "OUTPUT_BASE", "OUT_BLOCKS", "OVERSUBSCRIBED",
    "PAST_CACHES", "PATH", "PEER_INPUTS", "PEER_OUTPUTS", "PHASE", "PLACES", "POSITION", "PUBLISHES", "PUSHED", "RANK",
    "RECORD", "REFUSED", "REFUSED_AT", "RESETS", "ROOT", "ROW", "SCALARS", "SCRATCH", "SHORT", "SIZE", "SPECULATIVE",
    "SPINS", "STAGED", "STAGE_BASES", "STRIDE", "TABLE", "TABLE_LAGS", "TABLE_MEETS", "TABLE_PIECES", "TABLE_ROWS",
    "TEMP", "TEMP_BASE", "UNMAPPED", "UNREADY", "WAITS", "WINDOW", "WINDOWS",
]  # fmt: skip

RANK, SIZE, COUNTERS, HEADERS, HEADER, MEETINGS_BEGUN, ISSUED, COMPLETED, COMPLETED_AT, HEADER_OFFSET = range(10)
ISSUED_AT, ISSUED_KEPT, ISSUE_TIMES, END_TIMES, KEPT, BASE, SCRATCH, PLACES, OVERSUBSCRIBED, HANDLES, BOUNDS = range(
    10, 21
)
MAPPED, ABORTED_AT, RECORD, BASES, POSITION, SPINS = range(21, 27)
OUTPUT_BASE, TEMP_BASE, PEER_INPUTS, PEER_OUTPUTS, STAGE_BASES, BASES_COUNT = range(27, 33)
TABLE, ITERATION, ROW, FIRST_MEETING, ARRIVED, PHASE, PATH, UNMAPPED = range(33, 41)
FULL, RESETS, REFUSED_AT, PAST_CACHES = range(41, 45)
CONTROL_WORDS = PAST_CACHES + STATE_WORDS
"""The words of a control block: rank and size; where counters, headers, counts and times of calls lie; bytes of a
header and of a rank's record; how many issue times are kept; scratch memory; where handles lie and which heaps of peers
are mapped; the table of base addresses; where the number of the next meeting lies; how often a counter is polled before
the core is yielded; where in the table of bases (`Bases` of program/bind.py) each kind begins, and its length. Then the
state of the call under way, enough to resume it: its table; iteration and row (in words); the number of its first
meeting; whether this rank has arrived at the meeting it waits at; `PHASE`; its path (zero_copy.py); whether heaps are
to be mapped. Last, how many arrivals make a meeting complete; whether this rank resets counters: the first of its host
does; where the word lies that is not 0 once a peer has refused a message of this rank; and what past_caches.py
keeps."""

STAGED, DIRECT, PUSHED, HEADER_AT, STRIDE, OP, ROOT, LISTED, TEMP, PUBLISHES, LARGE, SPECULATIVE = range(12)
IN_BLOCKS, OUT_BLOCKS, IN_SIZES, EXCLUSIVE, COMPLETES, INLINE, SHORT, ONE_WRITER, WINDOWS, WINDOW = range(12, 22)
CALL_WORDS = WINDOW + 1
"""The words of a prepared call: its tables (0: none); the headers expected of the ranks, and the bytes from one to the
next, 0 if all have the same (no header: the call is a part of another one); the reduce op; the root, or -1; which of
input and output are tables of addresses; temporary memory; whether a handle is published, whether a piece of this rank
is large, and, written by the interpreter, whether the last such call was direct; how many blocks there are, and bytes
of those of the input; whether the output must not share memory with the input for direct access; whether the call is
complete with this program; how many halves further on in the table of bases its staging memory is, `bases.INLINE` if
that is in the counters' lines; whether it is so short that compiled loops need not release Python's lock; whether each
rank alone writes its staging memory, so that copies to it may go past the caches; how many windows of a half of the
staging memory such calls use in turn, and the bytes of one."""
INPUTS, OUTPUTS = 1, 2

TABLE_ROWS, TABLE_PIECES, TABLE_MEETS, TABLE_LAGS = range(4)
SCALARS = 4
"""The words before the rows of a table."""

DONE, WAITS, DIFFERS, ABORTED, UNREADY, REFUSED = range(6)
"""How a run ends: complete; at a meeting that is not complete; after the first meeting, since headers are not as
expected; after the last, since a peer aborted a direct call; complete, and there are heaps to map; complete, and a peer
has refused a message of this rank."""

BLOCK = 2048
"""Elements summed at a time, so that partial sums stay in the first cache; the scratch has 16 bytes for each."""

"""What an interpreter is told, in words of 64 bits: the control block of a rank in a group, and a prepared call.

The compiled loops hold these numbers.
"""

__all__ = [
    "ABANDONED",
    "ABANDONED_AT",
    "BASE",
    "BASES",
    "BASES_COUNT",
    "BEGUN",
    "BLOCK",
    "BOUNDS",
    "CALL_WORDS",
    "COMPLETED",
    "COMPLETED_AT",
    "COMPLETES",
    "CONTROL_WORDS",
    "COUNTED",
    "COUNTERS",
    "DIFFERS",
    "DIRECT",
    "DONE",
    "ENDS",
    "EXCLUSIVE",
    "FIRST",
    "HANDLES",
    "HEADER",
    "HEADERS",
    "HEADER_AT",
    "HEADER_PLACE",
    "INPUTS",
    "IN_BLOCKS",
    "IN_SIZES",
    "ISSUED",
    "ISSUED_AT",
    "ISSUED_KEPT",
    "ITERATION",
    "KEPT",
    "LARGE",
    "LISTED",
    "MAPPED",
    "MODE",
    "MOMENTS",
    "OP",
    "OUTPUTS",
    "OUTPUT_BASE",
    "OUT_BLOCKS",
    "OVERSUBSCRIBED",
    "PEER_INPUTS",
    "PEER_OUTPUTS",
    "PHASE",
    "PLACES",
    "POSITION",
    "PUBLISHES",
    "PUSHED",
    "RANK",
    "RECORD",
    "ROOT",
    "ROW",
    "SCALARS",
    "SCRATCH",
    "SIZE",
    "SPECULATIVE",
    "SPINS",
    "STAGED",
    "STAGE_BASES",
    "STRIDE",
    "TABLE",
    "TABLE_LAGS",
    "TABLE_MEETS",
    "TABLE_PIECES",
    "TABLE_ROWS",
    "TEMP",
    "TEMP_BASE",
    "UNMAPPED",
    "UNREADY",
    "WAITS",
]  # fmt: skip

RANK, SIZE, COUNTERS, HEADERS, HEADER, BEGUN, ISSUED, COMPLETED, COMPLETED_AT, HEADER_PLACE = range(10)
ISSUED_AT, ISSUED_KEPT, MOMENTS, ENDS, KEPT, BASE, SCRATCH, PLACES, OVERSUBSCRIBED, HANDLES, BOUNDS = range(10, 21)
MAPPED, ABANDONED_AT, RECORD, BASES, POSITION, SPINS = range(21, 27)
OUTPUT_BASE, TEMP_BASE, PEER_INPUTS, PEER_OUTPUTS, STAGE_BASES, BASES_COUNT = range(27, 33)
TABLE, ITERATION, ROW, FIRST, COUNTED, PHASE, MODE, UNMAPPED = range(33, 41)
CONTROL_WORDS = UNMAPPED + 1
"""The words of a control block. Who this is among how many; where counters, headers and books lie; bytes of a header
and of a rank's record; how many moments the books keep; scratch memory; where handles lie and what peers' memory is
mapped; the table of base addresses; where the number of the next meeting lies; how often a counter is read before the
core is yielded; where in the table of bases (`Bases` of program/bind.py) what begins, and its length. Then the state
of the call under way, which is all that is needed to go on with it: its table; iteration and row (in words); the
number of its first meeting; whether this rank has been counted at the meeting it waits at; `PHASE`; how it goes;
whether memory is to be mapped."""

STAGED, DIRECT, PUSHED, HEADER_AT, STRIDE, OP, ROOT, LISTED, TEMP, PUBLISHES, LARGE, SPECULATIVE = range(12)
IN_BLOCKS, OUT_BLOCKS, IN_SIZES, EXCLUSIVE, COMPLETES = range(12, 17)
CALL_WORDS = COMPLETES + 1
"""The words of a prepared call. Where its tables lie (0: there is none); where the headers are that the ranks are
expected to have, and the bytes from one to the next, 0 where all have the same (no header: the call is a part of
another one); the reduce op; the root, or -1; which of input and output are tables of addresses; where temporary memory
lies; whether an handle is laid, whether a piece of this rank is large, and, written by the interpreter, whether the last
such call went directly; how many blocks there are, and bytes of those of the input; whether the output must not share
memory with the input for the call to go directly; whether the call has ended with this program."""
INPUTS, OUTPUTS = 1, 2

TABLE_ROWS, TABLE_PIECES, TABLE_MEETS, TABLE_LAGS = range(4)
SCALARS = 4
"""The words before the rows of a table."""

DONE, WAITS, DIFFERS, ABANDONED, UNREADY = range(5)
"""How a run ends: the call is done; at a meeting that not all have come to; after the first meeting, for headers are
not as expected; after the last, for a peer has given up a direct call; done, and there is memory to be mapped."""

BLOCK = 2048
"""Elements summed at a time, so that partial sums stay in the first cache; the scratch has 16 bytes for each."""

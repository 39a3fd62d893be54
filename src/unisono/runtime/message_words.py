"""What compiled loops of messages are told, and what they answer. The loops are compiled with these inside."""

__all__ = [
    "BEGUN", "BELLS", "CAPACITY", "CONTROL", "CONTROLS", "CROWDED", "DATA", "HEAD", "HEARD", "JOB", "MOVED", "NBYTES",
    "OTHER", "PEER", "RANK", "RINGS", "SENDS", "SILENT", "SIZE", "SPINS", "TABLE",
]  # fmt: skip

TABLE = ("capacity", "rings", "controls", "control", "bells", "rank", "size", "crowded", "spins", "heard")
"""The words of a table (int64), in order: bytes of a ring, where the rings' data and their controls begin, bytes of a
control, where the bells begin, who this is among how many, where `CROWDED` of futex.py lies, how often the rings are
looked at before the core is yielded; and, written by `carry`,
this rank's bell as it was before the last look into the rings."""
CAPACITY, RINGS, CONTROLS, CONTROL, BELLS, RANK, SIZE, CROWDED, SPINS, HEARD = range(10)
JOB = ("sends", "peer", "head", "data", "nbytes", "moved", "begun")
"""The words of a job (int64), a message on its way: whether it is sent, to or from whom, where its head lies (what it
has to be, of one that is received) and where its payload, of how many bytes; and, written by the loops, how many of
them have moved, and whether the head has: 0, 1, or `OTHER`."""
SENDS, PEER, HEAD, DATA, NBYTES, MOVED, BEGUN = range(7)
SILENT, OTHER = -1, -2
"""Instead of the bytes moved: nothing has come, or can go; another message has come than the one that is expected."""

"""The wires: shared memory with its counters, board and rings."""

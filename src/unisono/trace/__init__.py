"""The communication time of a program: every call of every rank, and its waits."""

"""Hosts as they are: their cores, memories, interfaces and GPUs, and what a message between them costs."""

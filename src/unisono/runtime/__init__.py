"""Data movement: queues, interpreters of programs, reductions."""

"""Watching a group: guard, flight records, status pages, deadlocks, exit notes."""

"""Where a program's time goes: what every rank communicated, when, and what it waited for."""

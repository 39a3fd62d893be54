"""Importing this loads every compiled loop: for a server process from which ranks are forked, which then have them."""

from unisono.runtime.loops import KINDS, loops

__all__: list[str] = []

for _kind in KINDS:
    loops.serve(_kind, at_once=True)

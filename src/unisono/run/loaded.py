"""Importing this loads every compiled loop: for a server process from which ranks are forked, which then have them."""

import numpy as np

from unisono.run.loops import DTYPES, loops

__all__: list[str] = []

for _name in DTYPES:
    loops.serve(np.dtype(_name), at_once=True)

"""Programs of one rank: the traffic of a schedule, lowered to the rows of a program, bound to sizes.

Never imports torch.
"""

from unisono.program.bind import Table, bind
from unisono.program.defaults import Default, default
from unisono.program.lower import Unfit, best_staged, lower
from unisono.program.program import PLACEMENTS, Place, Program, Row

__all__ = [
    "PLACEMENTS",
    "Default",
    "Place",
    "Program",
    "Row",
    "Table",
    "Unfit",
    "best_staged",
    "bind",
    "default",
    "lower",
]

"""`select`: the best algorithm for a collective, a size and a topology, by the model or as measured here, and why."""

from unisono.selection.advice import explain, ranges
from unisono.selection.measured import BY_DEFAULT, Measured, Push, Row, table_path
from unisono.selection.selector import SIZES, Choice, Crossover, Quote, Selector, select

__all__ = [
    "BY_DEFAULT",
    "SIZES",
    "Choice",
    "Crossover",
    "Measured",
    "Push",
    "Quote",
    "Row",
    "Selector",
    "explain",
    "ranges",
    "select",
    "table_path",
]

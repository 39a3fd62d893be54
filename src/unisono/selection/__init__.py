"""`select`: the best algorithm for a collective, a size and a topology, by the model or as measured here, and why."""

from unisono.selection.advice import explain, ranges
from unisono.selection.measured import BY_DEFAULT, Measured, Push, Row, table_path
from unisono.selection.over_hosts import OverHosts, over_hosts
from unisono.selection.selector import SIZES, Choice, Crossover, Quote, Selector, select

__all__ = [
    "BY_DEFAULT",
    "SIZES",
    "Choice",
    "Crossover",
    "Measured",
    "OverHosts",
    "Push",
    "Quote",
    "Row",
    "Selector",
    "explain",
    "over_hosts",
    "ranges",
    "select",
    "table_path",
]

"""Options that several commands about schedules have."""

from typing import Annotated, Any

import typer

__all__ = [
    "Chunks",
    "Collective",
    "Hosts",
    "LinkTime",
    "Microbatches",
    "PerRank",
    "Ranks",
    "Root",
    "Source",
    "Times",
]

DEFAULT = "default"
"""In place of an algorithm: the one that runs if none is asked for."""
NAMED_SOURCE = f"An algorithm, a pipeline schedule, {DEFAULT} for what runs, a file, or - for standard input."
COLLECTIVE, RANKS, MICROBATCHES = "all_reduce", 4, 8
MOST = 1 << 24
"""Of ranks, chunks or microbatches: their products are to fit 64 bits."""


def _of_pipelines(*names: str, **how: Any) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(*names, rich_help_panel="Pipelines", **how)
    return option


Source = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE",
        help=NAMED_SOURCE,
    ),
]
Collective = Annotated[str | None, typer.Argument(help="What the algorithm is to do.", show_default=COLLECTIVE)]
Ranks = Annotated[int | None, typer.Option("--ranks", "-n", max=MOST, help="Number of ranks.", show_default=str(RANKS))]
Root = Annotated[int | None, typer.Option(help="Root of a broadcast, reduce, gather or scatter.", show_default="0")]
Chunks = Annotated[int | None, typer.Option(max=MOST, help="Pieces per block, for pipelining.", show_default="1")]
Hosts = Annotated[
    str | None,
    typer.Option(metavar="HOSTS", help="Which ranks share a host: 2, 2x4, 3+1, or 0-2,5/3,4.", show_default="one"),
]
Microbatches = Annotated[
    int | None,
    _of_pipelines("--microbatches", "-m", max=MOST, help="Microbatches of a step.", show_default=str(MICROBATCHES)),
]
PerRank = Annotated[
    int | None, _of_pipelines("--per-rank", help="Stages on each rank.", show_default="1; interleaved, zb-v: 2")
]
Times = Annotated[
    str | None,
    _of_pipelines(
        "--times",
        metavar="F,B,W",
        help="Of a rank's stages together, for one microbatch: forward, gradient of the input, of the weights.",
        show_default="1,1,1",
    ),
]
LinkTime = Annotated[float | None, _of_pipelines("--link", help="Time of a message.", show_default="0")]

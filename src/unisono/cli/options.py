"""Options that several commands have: those about schedules, and those that run on several hosts at once."""

import os
from functools import partial
from typing import Annotated

import typer

from unisono.errors import UsageError
from unisono.selection import BY_DEFAULT
from unisono.topo.survey import PORT

__all__ = [
    "Chunks",
    "Collective",
    "Hosts",
    "LinkTime",
    "Microbatches",
    "Peers",
    "PerRank",
    "Port",
    "Ranks",
    "Root",
    "Source",
    "Timeout",
    "Times",
    "checked_endpoint",
    "checked_port",
]

NAMED_SOURCE = f"An algorithm, a pipeline schedule, {BY_DEFAULT} for what runs, a file, or - for standard input."
COLLECTIVE, RANKS, MICROBATCHES = "all_reduce", 4, 8
MOST = 1 << 24
"""Of ranks, chunks or microbatches: their products are to fit 64 bits."""


_of_pipelines = partial(typer.Option, rich_help_panel="Pipelines")

Source = Annotated[str, typer.Argument(metavar="NAME|FILE", help=NAMED_SOURCE)]
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

Peers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer", metavar="ADDRESS", help="Another host where the same runs, without a launcher; several times."
    ),
]
Port = Annotated[
    int | None,
    typer.Option(help="Where the hosts exchange what they find.", show_default=f"MASTER_PORT + 1, or {PORT}"),
]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="To wait for the other hosts.")]


def checked_port(port: int | None, timeout: float) -> int:
    """The port that was asked for, or the one after MASTER_PORT. Raises `UsageError` if it, or the time, is none."""
    if not 0.1 <= timeout <= 3600:
        raise UsageError(f"--timeout is {timeout:g}, expected 0.1 to 3600 seconds")
    master = os.environ.get("MASTER_PORT", "")
    chosen = port if port is not None else int(master) + 1 if master.isdecimal() else PORT
    if not 0 < chosen < 1 << 16:
        raise UsageError(f"--port is {chosen}, expected 1 to 65535")
    return chosen


def checked_endpoint(endpoint: str) -> str:
    """torchrun's endpoint, empty if there is none. Raises `UsageError` for one that torchrun does not take."""
    bracketed = endpoint.startswith("[") and endpoint.endswith("]")  # an address of IPv6 without a port
    host, colon, port = (endpoint, "", "") if bracketed else endpoint.rpartition(":")
    if colon and not (host and port.isdecimal() and int(port) < 1 << 16):
        raise UsageError(f"--rdzv-endpoint is {endpoint}, expected HOST or HOST:PORT with a port of 0 to 65535")
    return endpoint

"""Options of the commands that run on several hosts at once: `topo` and `doctor`."""

import os
from typing import Annotated

import typer

from unisono.errors import UsageError
from unisono.topo.survey import PORT

__all__ = ["Peers", "Port", "Timeout", "checked_port"]

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

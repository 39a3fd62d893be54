"""`unisono weights plan`: what an update of saved layouts moves, with no process at all."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.cli.common import check_writable, echo, write
from unisono.errors import UsageError
from unisono.schedule import PRESETS, preset
from unisono.selection import Measured
from unisono.units import parse_nbytes

if TYPE_CHECKING:
    from unisono.weights import Plan

__all__ = ["app", "plan_command"]

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def _weights(context: typer.Context) -> None:
    """Weights of a model from trainer ranks to inference replicas: plan an update of saved layouts."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("plan")
def plan_command(
    trainer: Annotated[Path, typer.Argument(metavar="TRAINER.json", help="The senders' layout, by Layout.save.")],
    engines: Annotated[list[Path], typer.Argument(metavar="ENGINE.json...", help="A layout for every replica.")],
    rules: Annotated[Path | None, typer.Option(metavar="RULES.json", help="Rules, by unisono.weights.")] = None,
    bucket: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of a chunk, at most.")] = "32MiB",
    forward: Annotated[str, typer.Option(help="direct, chain, tree, or auto: what simulates best.")] = "auto",
    topology: Annotated[
        str, typer.Option(help=f"One of {', '.join(PRESETS)}; the first as `unisono tune broadcast` measured it here.")
    ] = "shared_memory",
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the schedule as a picture.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON instead.")] = False,
) -> None:
    """Explain an update of saved layouts: bytes by rank, buckets, forwarding, predicted time, the bound, the drawing.

    Exits with 2, and one table of all differences, if what is sent does not fit what is wanted. Examples:

        unisono weights plan trainer.json engine.json engine.json

        unisono weights plan trainer.json engine.json --rules rules.json --bucket 1MiB --svg plan.svg
    """
    from unisono.drawing import draw
    from unisono.weights import Layout, plan
    from unisono.weights.rules import load_rules

    check_writable(svg)
    loaded = {path: Layout.load(path) for path in (trainer, *engines)}
    given = () if rules is None else load_rules(rules)
    made = plan(loaded[trainer], [loaded[path] for path in engines], given, bucket=_bucket(bucket), forward=forward)
    measured = Measured.load().shared_memory(made.world_size) if topology == "shared_memory" else None
    where = measured or preset(topology, made.world_size)
    echo(
        json.dumps(_to_json(made, made.bound(where), made.simulate(where).time, where.name))
        if as_json
        else made.explain(where)
    )
    if svg is not None:
        write(svg, str(draw(made.schedule, "svg", style="rows")))


def _bucket(text: str) -> int:
    nbytes = parse_nbytes(text)
    if nbytes < 1:
        raise UsageError(f"--bucket must be at least 1 byte, got {text}")
    return nbytes


def _to_json(plan: "Plan", bound: float, seconds: float, topology: str) -> dict[str, Any]:
    return {
        "nbytes": plan.nbytes,
        "sent": plan.sent,
        "received": plan.received,
        "forward": plan.forward,
        "topology": topology,
        "seconds": seconds,
        "bound": bound,
        "chunks": [chunk._asdict() for chunk in plan.chunks],
        "schedule": plan.schedule.to_json(),
    }

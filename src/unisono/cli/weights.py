"""`unisono weights plan`: what an update of saved layouts moves, with no process at all."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.cli.common import check_writable, echo, write
from unisono.errors import UsageError
from unisono.schedule import PRESETS
from unisono.units import parse_nbytes

if TYPE_CHECKING:
    from unisono.weights import Plan
    from unisono.weights.prediction import Prediction

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
        str | None,
        typer.Option(
            help=f"One of {', '.join(PRESETS)}.", show_default="this host as `unisono tune weights` measured it"
        ),
    ] = None,
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
    echo(json.dumps(_to_json(made, made.predict(topology))) if as_json else made.explain(topology))
    if svg is not None:
        write(svg, str(draw(made.schedule, "svg", style="rows")))


def _bucket(text: str) -> int:
    nbytes = parse_nbytes(text)
    if nbytes < 1:
        raise UsageError(f"--bucket must be at least 1 byte, got {text}")
    return nbytes


def _to_json(plan: "Plan", predicted: "Prediction") -> dict[str, Any]:
    return {
        "nbytes": plan.nbytes,
        "sent": plan.sent,
        "received": plan.received,
        "forward": plan.forward,
        "topology": predicted.where,
        "seconds": predicted.seconds,
        "bound": predicted.bound,
        "chunks": [chunk._asdict() for chunk in plan.chunks],
        "schedule": plan.schedule.to_json(),
    }

"""The command `unisono`: one sub-command per file in this folder, and the boundary where errors become one line.

A new command is a module with a function, one import and one line in the list `COMMANDS` below. Command modules import
torch inside their function, so that `unisono --help` answers at once.
"""

import sys
from collections.abc import Callable
from errno import ENOSPC
from importlib.metadata import version
from inspect import getdoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from unisono.cli import (
    bench,
    bench_weights,
    doctor,
    draw,
    list_,
    plan,
    ps,
    simulate,
    topo,
    trace,
    train,
    tune,
    verify,
    weights,
)
from unisono.cli.common import INTERRUPT_EXIT, USAGE_EXIT
from unisono.errors import UnisonoError

__all__ = ["app", "main"]

COMMANDS: dict[str, Callable[..., None]] = {
    "train": train.train,
    "draw": draw.draw,
    "verify": verify.verify,
    "simulate": simulate.simulate_command,
    "plan": plan.plan,
    "tune": tune.tune,
    "bench": bench.bench,
    "bench weights": bench_weights.bench_weights,
    "trace": trace.trace,
    "list": list_.list_,
    "ps": ps.ps,
    "topo": topo.topo,
    "doctor": doctor.doctor,
}
GROUPS: dict[str, typer.Typer] = {"weights": weights.app}
"""Commands that have commands of their own."""


class _OneLineErrors(TyperGroup):
    """A group of commands that ends every expected failure with one line on stderr and an exit code, no traceback.

    UnisonoError and malformed command lines exit with 2, Ctrl-C with 130. Anything else is a defect of ours and keeps
    its traceback. It sits on the group, not in `main`, so that tests with a CliRunner see the same behaviour. A command
    may have a name of two words, of which the first is a command too.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The longest name that is a command, and the arguments after it."""
        two = " ".join(args[:2])
        return super().resolve_command(ctx, [two, *args[2:]] if two in self.commands else args)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run one command line and leave through SystemExit, as the parser does in its standalone mode."""
        try:
            result = super().main(*args, **{**kwargs, "prog_name": "unisono", "standalone_mode": False})
        except UnisonoError as error:
            raise SystemExit(_complain(str(error))) from None
        except (KeyboardInterrupt, typer.Abort):
            raise SystemExit(INTERRUPT_EXIT) from None
        except MemoryError:
            raise SystemExit(_complain("out of memory: ask for fewer ranks, chunks or microbatches")) from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno == ENOSPC:
                raise SystemExit(_complain(f"cannot write: {error.strerror}")) from None
            describe = getattr(error, "format_message", None)  # what every error of the option parser carries
            if describe is None:
                raise
            words = describe().strip()
            stop = "" if words.endswith((".", "?")) else "."
            raise SystemExit(_complain(f"{words}{stop}{_remedy(error)}")) from None
        raise SystemExit(result if isinstance(result, int) else 0)


def _remedy(error: Exception) -> str:
    """The commands there are, or where the options of this one are explained."""
    context = getattr(error, "ctx", None)
    if context is None:
        return ""
    if isinstance(context.command, TyperGroup) and not str(error).startswith("No such option"):
        return f" The commands are {', '.join(context.command.commands)}."
    return f" See `{context.command_path} --help`."


def _complain(message: str) -> int:
    """Write the message to stderr and return the exit code that goes with it."""
    if sys.stderr is not None:
        sys.stderr.write(f"unisono: {message.strip()}\n")
    return USAGE_EXIT


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"unisono {version('unisono')}")
        raise typer.Exit


app = typer.Typer(
    cls=_OneLineErrors,
    name="unisono",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Collective communication and parallel training for PyTorch."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _help(command: Callable[..., None]) -> str:
    """The docstring, a line per paragraph and per example: the terminal's width breaks them, not the source's."""
    paragraphs = (getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(line.strip() for line in paragraph.splitlines()) for paragraph in paragraphs)


for _name, _command in COMMANDS.items():
    app.command(_name, help=_help(_command))(_command)
for _name, _group in GROUPS.items():
    for _each in _group.registered_commands:
        _each.help = _help(_each.callback) if _each.callback else None
    app.add_typer(_group, name=_name)


def main() -> None:
    """Runs one command line."""
    app()

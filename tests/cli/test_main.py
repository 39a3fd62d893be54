from importlib.metadata import version

import pytest
import typer
from typer.testing import CliRunner

from unisono.cli import main
from unisono.errors import MismatchError


@pytest.fixture
def failing() -> typer.Typer:
    """The same boundary around commands that fail in every way."""
    app = typer.Typer(cls=main._OneLineErrors)

    @app.command()
    def ours() -> None:
        raise MismatchError("rank 0 said all_reduce, rank 1 said broadcast")

    @app.command()
    def interrupted() -> None:
        raise KeyboardInterrupt

    @app.command()
    def defect() -> None:
        raise ZeroDivisionError

    @app.command()
    def ended() -> None:
        raise typer.Exit(3)

    return app


def test_version() -> None:
    result = CliRunner().invoke(main.app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"unisono {version('unisono')}\n")


def test_no_command_shows_all_commands() -> None:
    result = CliRunner().invoke(main.app, [])
    assert result.exit_code == 0
    assert all(name in result.stdout for name in main.COMMANDS)


def test_an_unknown_command_is_one_line() -> None:
    result = CliRunner().invoke(main.app, ["trian"])
    assert result.exit_code == 2
    assert result.stderr.startswith("unisono: No such command 'trian'")
    assert "The commands are train, draw, verify, " in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_unknown_option_says_where_options_are_explained() -> None:
    assert CliRunner().invoke(main.app, ["--versio"]).stderr.endswith(" See `unisono --help`.\n")
    assert CliRunner().invoke(main.app, ["list", "--fast"]).stderr.endswith("--fast. See `unisono list --help`.\n")


@pytest.mark.parametrize("command", [[], *([name] for name in main.COMMANDS)])
def test_help_has_a_short_option(command: list[str]) -> None:
    short, long = (CliRunner().invoke(main.app, [*command, option]) for option in ("-h", "--help"))
    assert (short.exit_code, short.stdout) == (0, long.stdout)


def test_our_errors_are_one_line_and_exit_code_2(failing: typer.Typer) -> None:
    result = CliRunner().invoke(failing, ["ours"])
    assert result.exit_code == 2
    assert result.stderr == "unisono: rank 0 said all_reduce, rank 1 said broadcast\n"


@pytest.mark.parametrize(("command", "code"), [("interrupted", 130), ("ended", 3)])
def test_other_ends_have_their_exit_code_and_say_nothing(failing: typer.Typer, command: str, code: int) -> None:
    result = CliRunner().invoke(failing, [command])
    assert (result.exit_code, result.output) == (code, "")


def test_a_defect_keeps_its_traceback(failing: typer.Typer) -> None:
    assert isinstance(CliRunner().invoke(failing, ["defect"]).exception, ZeroDivisionError)


def test_every_command_has_help() -> None:
    for name in main.COMMANDS:
        result = CliRunner().invoke(main.app, [name, "--help"])
        assert result.exit_code == 0
        assert name in result.stdout


def test_help_is_broken_by_the_terminal_not_by_the_source() -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(main.app, ["trace", "--help"]).stdout
    assert "on this host, and its exit code is this command's." in shown

"""The command `sapwood`: finds the sub-command that was asked for and runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points, version
from typing import Annotated

import typer

from sapwood_server.errors import SapwoodError
from sapwood_server.usage import USAGE_EXIT_CODE, usage_line

COMMAND_GROUP = "sapwood.commands"
"""The entry points of the sub-commands: each has its first word as a name and gives `register(app)`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends in SystemExit. What is wrong is one line on stderr: a SapwoodError with exit code 1, a
    command line that can't be read with 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    app = typer.Typer(name="sapwood", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_root)
    for register in _registrations(given):
        register(app)
    try:
        code = app(given, prog_name="sapwood", standalone_mode=False)
    except typer.TyperException as error:
        line = usage_line(error, given)
        if line:
            typer.echo(line, err=True)
        raise SystemExit(USAGE_EXIT_CODE) from None
    except SapwoodError as error:
        typer.echo(f"sapwood: {' '.join(str(error).split())}", err=True)
        raise SystemExit(1) from None
    raise SystemExit(code or 0)


def _registrations(arguments: Sequence[str]) -> list[Callable[[typer.Typer], None]]:
    """Those of the command that is called; all of them if it is none of them, for the help.

    Loaded one by one, since some commands import what others do not need and take long to.
    """
    commands = {entry.name: entry for entry in entry_points(group=COMMAND_GROUP)}
    called = [commands[word] for word in arguments[:1] if word in commands]
    return [entry.load() for entry in called or [commands[name] for name in sorted(commands)]]


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(version("sapwood"))
        raise typer.Exit


def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Sapwood: a self-hosted inference server with prefix-cached attention."""


if __name__ == "__main__":
    main()

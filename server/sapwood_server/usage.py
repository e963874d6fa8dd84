"""What is wrong with a command line, in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from sapwood_server.quoting import LINE_CHARACTERS, quote, shorten

USAGE_EXIT_CODE = 2
"""The shells' own for a wrong use, as against 1 for what failed."""


def usage_line(error: typer.TyperException, arguments: Sequence[str]) -> str:
    """`sapwood serve: --port is 'abc': input should be ...`; empty if there is nothing to say, as the help was shown.

    The parser names the option but not the value, so that is looked up in `arguments`.
    """
    context: Any = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "sapwood"
    message = _of_parameter(error, arguments) or shorten(error.format_message(), LINE_CHARACTERS)
    if not message:
        return ""
    commands = _commands(context)
    accepted = f" (accepted: {', '.join(commands)})" if commands else f"; see {command} --help"
    return f"{command}: {message.rstrip('.')}{accepted}"


def _of_parameter(error: typer.TyperException, arguments: Sequence[str]) -> str | None:
    if not isinstance(error, typer.BadParameter) or error.param is None or not error.message:
        return None
    name = max(error.param.opts, key=len)
    value = _value_of(error.param.opts, arguments)
    said = f"{name} is {quote(value)}" if value is not None else name
    return f"{said}: {error.message[:1].lower()}{error.message[1:]}"


def _value_of(names: Sequence[str], arguments: Sequence[str]) -> str | None:
    """The option's value, the last if it is given several times; None if it came from elsewhere."""
    value = None
    for index, argument in enumerate(arguments):
        name, equals, attached = argument.partition("=")
        if name in names:
            value = attached if equals else arguments[index + 1] if index + 1 < len(arguments) else None
    return value


def _commands(context: Any) -> list[str]:
    """The sub-commands where one of them was to be named."""
    lister = getattr(context.command, "list_commands", None) if context is not None else None
    return list(lister(context)) if lister is not None else []

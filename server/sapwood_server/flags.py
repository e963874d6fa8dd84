"""Command-line flags that derive from ServerConfig's fields: names, helps and defaults are written there, once."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import typer

from sapwood_server.config import ServerConfig
from sapwood_server.errors import StartupError
from sapwood_server.quoting import LINE_CHARACTERS, quote

_POSITIONAL_MODEL = "positional_model"


def config_command(function: Callable[..., None], *, http: bool = False) -> Callable[..., None]:
    """A typer command that calls `function(config, ...)`.

    The command takes MODEL, then the function's own parameters (annotated for typer), then one flag for each field of
    ServerConfig; only with `http` for those about answering HTTP, which would have no effect. It raises StartupError
    for values that ServerConfig refuses, and for two different models.
    """
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    fields_of_flags = [field for field in dataclasses.fields(ServerConfig) if http or not field.metadata.get("http")]

    def command(**values: Any) -> None:
        model = values.pop(_POSITIONAL_MODEL)
        fields = {field.name: _freeze(values.pop(field.name)) for field in fields_of_flags}
        if fields["model"] is None:
            fields["model"] = ServerConfig.model if model is None else model
        elif model is not None and model != fields["model"]:
            names = [quote(name, LINE_CHARACTERS) for name in (model, fields["model"])]
            raise StartupError(f"MODEL is {names[0]} and --model is {names[1]}; accepted: one of them")
        function(ServerConfig(**fields), **values)

    parameters = [_model_argument(), *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own)]
    command.__signature__ = inspect.Signature([*parameters, *_flags(fields_of_flags)])  # type: ignore[attr-defined]
    command.__doc__ = function.__doc__
    command.__name__ = function.__name__
    return command


def _model_argument() -> inspect.Parameter:
    text = dataclasses.fields(ServerConfig)[0].metadata["help"]
    argument = typer.Argument(metavar="MODEL", help=text, show_default=ServerConfig.model)
    return _parameter(_POSITIONAL_MODEL, Annotated[str | None, argument], None)


def _flags(fields: Iterable[dataclasses.Field[Any]]) -> Iterator[inspect.Parameter]:
    hints = typing.get_type_hints(ServerConfig)
    for field in fields:
        flag = field.metadata.get("flag", "--" + field.name.replace("_", "-"))
        if field.name == "model":
            option = typer.Option(flag, help="The same as MODEL.", show_default=False)
            yield _parameter(field.name, Annotated[str | None, option], None)
            continue
        option = typer.Option(flag, help=field.metadata["help"], envvar=field.metadata.get("variable"))
        several = typing.get_origin(hints[field.name]) is tuple
        kind = list[str] if several else hints[field.name]
        default: Any = [] if several else field.default
        yield _parameter(field.name, Annotated[kind, option], default)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

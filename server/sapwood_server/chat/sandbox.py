"""The jinja environment that chat templates run in: sandboxed, metered, without a clock.

A template comes with the model, so it is somebody else's program. It may not reach Python's internals (jinja's
sandbox), may not read the time (the prompt must not depend on it), and its loops, calls and operators may not run or
grow without end (the meter). Filters and string methods are Python's own and not metered: a template that is made to
waste time still can.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sized
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

PINNED_DATE = datetime(2024, 7, 26)
"""What `strftime_now` formats. Fixed, so that equal messages give equal prompts on every day; a caller that wants the
model to know the date says it in a message, or in the template's own option for it."""

MAX_STEPS = 250_000
"""Loop iterations and calls that one rendering may take. A conversation of 10,000 messages takes some 100,000; as many
as are allowed take one to two seconds."""

MAX_LENGTH = 64 * 2**20
"""Characters of a rendering or of any part of it, and items or characters of any value that an operator builds."""

_MAX_INT_BITS = 128


class RunawayTemplateError(jinja2.TemplateError):
    """The template took more steps, or built a larger value, than any conversation needs."""


@dataclass
class _Meter:
    steps: int = 0

    def tick(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise RunawayTemplateError(f"took more than {MAX_STEPS} steps")


_meter: ContextVar[_Meter] = ContextVar("template_meter")


class _Metered:
    """An iterable that costs a step per item; it keeps its length, which templates read as `loop.length`."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        meter = _meter.get()
        for item in self._items:
            meter.tick()
            yield item

    def __len__(self) -> int:
        if not isinstance(self._items, Sized):
            raise TypeError("this iterable has no length")
        return len(self._items)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's part for training; serving renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja's base class declares

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _join(pieces: Iterable[Any]) -> str:
    """What `~` makes of its operands, and a macro or a `set` block of what it wrote."""
    texts = [str(piece) for piece in pieces]
    if sum(map(len, texts)) > MAX_LENGTH:
        raise RunawayTemplateError(f"wrote more than {MAX_LENGTH} characters")
    return "".join(texts)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it (the conventions of Hugging Face's `apply_chat_template`), with limits."""

    intercepted_binops = frozenset({"+", "*", "**"})
    concat = staticmethod(_join)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = _to_json
        self.filters["_metered"] = _Metered
        self.filters["_join"] = _join
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = PINNED_DATE.strftime

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_metered", [], [], None, None, lineno=loop.lineno)
        for concat in list(source.find_all(nodes.Concat)):
            operands = nodes.List(concat.nodes, lineno=concat.lineno)
            concat.nodes = [nodes.Filter(operands, "_join", [], [], None, None, lineno=concat.lineno)]
        return super()._generate(source, *args, **kwargs)

    def call(self, context: Context, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Every call that a template makes comes through here, macros included."""
        _meter.get().tick()
        return super().call(context, target, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses an operation whose result would be too large, before it is computed."""
        if _result_size(operator, left, right) > MAX_LENGTH:
            raise RunawayTemplateError(f"built a value of more than {MAX_LENGTH} items with {operator!r}")
        return super().call_binop(context, operator, left, right)


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The template's text for these variables.

    Raises RunawayTemplateError over a limit, and whatever the template itself raises.
    """
    token = _meter.set(_Meter())
    try:
        pieces: list[str] = []
        length = 0
        for piece in template.generate(variables):
            length += len(piece)
            if length > MAX_LENGTH:
                raise RunawayTemplateError(f"wrote more than {MAX_LENGTH} characters")
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _meter.reset(token)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter this does not escape `<`, `>`, `&` and `'`: a prompt is no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Items of the result, or for numbers 0 if it is small and more than any limit if it is not."""
    if isinstance(left, int) and isinstance(right, int):
        return _int_size(operator, left, right)
    left_size = len(left) if isinstance(left, Sized) else 0
    right_size = len(right) if isinstance(right, Sized) else 0
    if operator == "+":
        return left_size + right_size
    count = right if isinstance(right, int) else left if isinstance(left, int) else 0
    return max(left_size, right_size) * max(count, 0)


def _int_size(operator: str, left: int, right: int) -> int:
    bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
    return 0 if bits <= _MAX_INT_BITS else MAX_LENGTH + 1

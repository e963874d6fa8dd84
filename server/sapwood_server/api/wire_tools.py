"""Checks of `tools`. What passes is given to the template exactly as it came."""

from __future__ import annotations

import re
from typing import Any

from sapwood_server.chat.messages import Tool
from sapwood_server.errors import BadRequestError
from sapwood_server.quoting import quote_json, shorten

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict"})


def check_tools(tools: list[dict[str, Any]]) -> tuple[Tool, ...]:
    """The same tools. Raises BadRequestError for one that is not a function tool of OpenAI's shape."""
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    return tuple(tools)


def _check_tool(tool: dict[str, Any], where: str) -> None:
    if tool.get("type") != "function":
        raise _wrong(f"{where}.type", tool.get("type"), "'function'")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _wrong(f"{where}.function", function, "an object with 'name'")
    for field in sorted((tool.keys() - {"type", "function"}) | (function.keys() - _FUNCTION_FIELDS)):
        inside = where if field in tool else f"{where}.function"
        path = f"{inside}.{shorten(field)}"
        raise BadRequestError(f"unknown field: {path}", code="unknown_field", param=path)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(f"{where}.function.name", name, "1 to 64 letters, digits, '_', '-' or '.'")
    if not isinstance(function.get("description"), str | None):
        raise _wrong(f"{where}.function.description", function["description"], "a string")
    if not isinstance(function.get("parameters"), dict | None):
        raise _wrong(f"{where}.function.parameters", function["parameters"], "a JSON schema, which is an object")
    if function.get("strict") not in (None, False):
        raise _wrong(f"{where}.function.strict", function["strict"], "false: strict tools are not implemented")


def _wrong(where: str, value: Any, accepted: str) -> BadRequestError:
    return BadRequestError(f"{where} is {quote_json(value)}; accepted: {accepted}", param=where)

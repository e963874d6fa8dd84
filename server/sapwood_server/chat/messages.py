"""Messages of a conversation, in the one shape that every endpoint's wire types are turned into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]

Tool = dict[str, Any]
"""A tool as the client sent it: templates get it unchanged, so that its bytes in the prompt never vary."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call that an earlier assistant message made."""

    id: str
    name: str
    arguments: str
    """The text the client sent, byte for byte; `"{}"` where it sent none."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message. Content parts are already joined, a `developer` is already a `system`."""

    role: Role
    content: str
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

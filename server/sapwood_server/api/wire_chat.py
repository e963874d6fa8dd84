"""The body of `POST /v1/chat/completions`, and its messages in the chat room's shape."""

from __future__ import annotations

from typing import Any

import msgspec

from sapwood_server.api.wire_shared import SharedBody
from sapwood_server.chat.messages import Message, Role, ToolCall
from sapwood_server.errors import BadRequestError
from sapwood_server.quoting import quote

PART_SEPARATOR = "\n"
"""Between the text parts of one message."""


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A part of a message's content."""

    text: str
    cache_control: Any = None


Content = str | list[TextPart]


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """The function part of a tool call."""

    name: str
    arguments: str | None = None


class WireToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call that an earlier assistant message made."""

    id: str
    function: FunctionCall
    type: str = "function"
    index: int | None = None


class _WireMessage(msgspec.Struct, tag_field="role", kw_only=True, forbid_unknown_fields=True):
    name: str | None = None
    cache_control: Any = None


class SystemMessage(_WireMessage, tag="system"):
    """Instructions."""

    content: Content


class DeveloperMessage(_WireMessage, tag="developer"):
    """Instructions under OpenAI's newer name; the model sees a system message."""

    content: Content


class UserMessage(_WireMessage, tag="user"):
    """What the user says."""

    content: Content


class ToolMessage(_WireMessage, tag="tool"):
    """What a tool returned."""

    content: Content
    tool_call_id: str


class AssistantMessage(_WireMessage, tag="assistant"):
    """What the model said earlier, in the shape in which OpenAI's clients hand it back."""

    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[WireToolCall] | None = None
    refusal: Any = None
    audio: Any = None
    function_call: Any = None
    annotations: Any = None


WireMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class ChatBody(SharedBody, kw_only=True, forbid_unknown_fields=True):
    """A chat request."""

    messages: list[WireMessage] | None = None
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None

    verbosity: Any = None

    reasoning_effort: Any = None
    continue_final_message: Any = None
    response_format: Any = None
    modalities: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None

    @property
    def length_field(self) -> str:
        """`max_completion_tokens`, or `max_tokens`, its older name."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


_ROLES: dict[type[WireMessage], Role] = {
    SystemMessage: "system",
    DeveloperMessage: "system",
    UserMessage: "user",
    AssistantMessage: "assistant",
    ToolMessage: "tool",
}


def to_messages(wire: list[WireMessage]) -> tuple[Message, ...]:
    """The messages for the template, in order. Raises BadRequestError for one that can't be served."""
    if not wire:
        raise BadRequestError("messages is []; accepted: at least one message", param="messages")
    if isinstance(wire[-1], AssistantMessage):
        raise BadRequestError(
            "the last message is from the assistant; accepted: a last message from anybody else (continuing an answer "
            "is not implemented)",
            code="unsupported_value",
            param=f"messages[{len(wire) - 1}].role",
        )
    return tuple(_to_message(message, f"messages[{index}]") for index, message in enumerate(wire))


def ignored_in_messages(wire: list[WireMessage]) -> tuple[str, ...]:
    """Fields of messages that have no effect, each named once."""
    names: dict[str, None] = {}
    for message in wire:
        parts = message.content if isinstance(message.content, list) else []
        if message.cache_control is not None or any(part.cache_control is not None for part in parts):
            names["messages[].cache_control"] = None
        if isinstance(message, AssistantMessage) and message.annotations:
            names["messages[].annotations"] = None
    return tuple(names)


def _to_message(wire: WireMessage, where: str) -> Message:
    if isinstance(wire, AssistantMessage):
        return _to_assistant(wire, where)
    return Message(
        role=_ROLES[type(wire)],
        content=_join(wire.content),
        name=wire.name,
        tool_call_id=wire.tool_call_id if isinstance(wire, ToolMessage) else None,
    )


def _to_assistant(wire: AssistantMessage, where: str) -> Message:
    for field in ("refusal", "audio", "function_call"):
        if getattr(wire, field) is not None:
            raise BadRequestError(
                f"{where}.{field} is not implemented; accepted: null",
                code="unsupported_parameter",
                param=f"{where}.{field}",
            )
    if wire.content is None and not wire.tool_calls:
        raise BadRequestError(
            f"{where}.content is null; accepted: a string or a list of text parts, or null beside tool_calls",
            param=f"{where}.content",
        )
    calls = tuple(_to_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(wire.tool_calls or ()))
    return Message(
        role="assistant",
        content=_join(wire.content or ""),
        name=wire.name,
        reasoning_content=wire.reasoning_content,
        tool_calls=calls,
    )


def _to_call(wire: WireToolCall, where: str) -> ToolCall:
    if wire.type != "function":
        raise BadRequestError(
            f"{where}.type is {quote(wire.type)}; accepted: 'function'",
            code="unsupported_value",
            param=f"{where}.type",
        )
    return ToolCall(id=wire.id, name=wire.function.name, arguments=wire.function.arguments or "{}")


def _join(content: Content) -> str:
    return content if isinstance(content, str) else PART_SEPARATOR.join(part.text for part in content)

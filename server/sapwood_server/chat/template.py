"""Chat templates: from messages and tools to the text of a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from sapwood_server.chat.messages import Message, Tool, ToolCall
from sapwood_server.chat.sandbox import RunawayTemplateError, TemplateSandbox, render
from sapwood_server.errors import BadRequestError, StartupError
from sapwood_server.quoting import quote, reason_of, shorten

RESERVED_OPTIONS = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"})
"""Variables of a template that the request's own fields set, so `chat_template_kwargs` may not."""

_PROBE_ARGUMENTS = '{"probe_key": "probe <value>"}'


class ChatTemplate:
    """The named templates of one model.

    As with Hugging Face's tokenizers, `tool_use` is taken for a request that brings tools where the model has one, and
    `default` for all else.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources`: template text by name. `special_tokens`: `bos_token`, `eos_token`, ... as text.

        Raises StartupError if a template can't be parsed or runs without end on a one-line conversation.
        """
        sandbox = TemplateSandbox()
        self._special_tokens = dict(special_tokens)
        self._templates = {name: _compile(sandbox, name, source) for name, source in sources.items()}
        self._text_arguments = {name: self._takes_text_arguments(name) for name in self._templates}

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], options: Mapping[str, Any]) -> str:
        """The prompt up to where the assistant's answer begins.

        Raises BadRequestError if the template refuses the messages, and if `options` names a reserved variable.
        """
        for key in options:
            if key in RESERVED_OPTIONS or key in self._special_tokens:
                raise BadRequestError(
                    f"chat_template_kwargs.{key} can't be set: the server sets it from the request and the model",
                    param="chat_template_kwargs",
                )
        name = self._choose(bool(tools))
        try:
            return self._render(name, messages, tools, options, text_arguments=self._text_arguments[name])
        except Exception as error:  # A template is a program: it can raise anything that Python can.
            reason = f"the model's chat template {_verdict(error)}"
            raise BadRequestError(reason, code="template_error", param="messages") from error

    def _choose(self, with_tools: bool) -> str:
        if with_tools and "tool_use" in self._templates:
            return "tool_use"
        if "default" in self._templates:
            return "default"
        names = shorten(", ".join(sorted(self._templates))) or "none at all"
        raise BadRequestError(
            f"this model has no default chat template, only {names}; use /v1/completions",
            code="no_chat_template",
            param="messages",
        )

    def _render(
        self,
        name: str,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        options: Mapping[str, Any],
        *,
        text_arguments: bool,
    ) -> str:
        variables = {
            **self._special_tokens,
            **options,
            "messages": [_to_template(message, text_arguments) for message in messages],
            "tools": list(tools) or None,
            "documents": options.get("documents"),
            "add_generation_prompt": True,
        }
        return render(self._templates[name], variables)

    def _takes_text_arguments(self, name: str) -> bool:
        """Whether a call's arguments, given as text, come out verbatim. If not, the template wants a mapping."""
        call = ToolCall(id="call00001", name="probe", arguments=_PROBE_ARGUMENTS)
        messages = (
            Message(role="user", content="probe"),
            Message(role="assistant", content="", tool_calls=(call,)),
            Message(role="tool", content="probe", tool_call_id=call.id),
        )
        tool = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object"}}}
        try:
            return _PROBE_ARGUMENTS in self._render(name, messages, (tool,), {}, text_arguments=True)
        except RunawayTemplateError as error:
            raise StartupError(f"chat template {quote(name)} {error} on a conversation of three messages") from error
        except Exception:  # noqa: BLE001 - it may refuse text, or calls of any kind: mappings are the convention
            return False


def _verdict(error: Exception) -> str:
    """What happened to a rendering, for the client."""
    if isinstance(error, RunawayTemplateError):
        return f"{error} on these messages"
    if isinstance(error, jinja2.TemplateError):
        return f"refuses these messages: {reason_of(error)}"
    return f"fails on these messages: {type(error).__name__}: {reason_of(error)}"


def _compile(sandbox: TemplateSandbox, name: str, source: str) -> jinja2.Template:
    try:
        return sandbox.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        where = f"line {error.lineno}: {reason_of(error)}"
        raise StartupError(f"chat template {quote(name)} can't be parsed: {where}") from error
    except RecursionError as error:
        raise StartupError(f"chat template {quote(name)} can't be parsed: it is nested too deeply") from error


def _to_template(message: Message, text_arguments: bool) -> dict[str, Any]:
    """The dict that templates read; keys without a value are left out, since templates ask `is defined`."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        fields["name"] = message.name
    if message.reasoning_content is not None:
        fields["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        fields["tool_calls"] = [_call_to_template(call, text_arguments) for call in message.tool_calls]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _call_to_template(call: ToolCall, text_arguments: bool) -> dict[str, Any]:
    arguments: Any = call.arguments if text_arguments else _as_mapping(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _as_mapping(arguments: str) -> dict[str, Any] | str:
    """The parsed object. A model can write arguments that are none; the template then gets the text as it is."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments

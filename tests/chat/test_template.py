"""Chat templates: what they are given, which one is taken, and what happens when they refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from sapwood_server.chat.messages import Message, ToolCall
from sapwood_server.chat.template import ChatTemplate
from sapwood_server.errors import BadRequestError, StartupError

USER = Message(role="user", content="hi")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALLS_AS_MAPPING = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)
CALLS_AS_TEXT = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '[' + c.function.arguments + ']' }}{% endfor %}"
    "{% endfor %}"
)


def render(source: str | Mapping[str, str], *messages: Message, tools: Any = (), **options: Any) -> str:
    """The prompt of one or several named templates."""
    sources = {"default": source} if isinstance(source, str) else source
    return ChatTemplate(sources, {"bos_token": "<s>"}).render(messages or (USER,), tools, options)


def calling(arguments: str) -> Message:
    """An assistant's message with one call."""
    return Message(role="assistant", content="", tool_calls=(ToolCall(id="c1", name="f", arguments=arguments),))


def test_a_prompt_ends_where_the_answer_begins() -> None:
    assert render(CHATML, Message(role="system", content="s"), USER) == "<system>s<user>hi<assistant>"


def test_templates_get_special_tokens_tools_and_options() -> None:
    source = "{{ bos_token }}{{ tools | tojson }}{{ enable_thinking }}{{ documents | length }}"
    text = render(source, tools=(TOOL,), enable_thinking=False, documents=[1])
    assert text == (
        '<s>[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]False1'
    )


def test_no_tools_is_none_and_absent_keys_are_undefined() -> None:
    source = "{{ tools is none }}{{ messages[0].tool_calls is defined }}{{ messages[0].name is defined }}"
    assert render(source) == "TrueFalseFalse"


def test_all_fields_of_a_message_reach_the_template() -> None:
    source = "{% for m in messages %}{{ m.name }},{{ m.reasoning_content }},{{ m.tool_call_id }};{% endfor %}"
    text = render(
        source,
        Message(role="assistant", content="x", reasoning_content="r", name="n"),
        Message(role="tool", content="y", tool_call_id="c1"),
    )
    assert text == "n,r,;,,c1;"


def test_a_request_with_tools_takes_the_template_for_them() -> None:
    sources = {"default": "plain", "tool_use": "with tools"}
    assert render(sources) == "plain"
    assert render(sources, tools=(TOOL,)) == "with tools"
    assert render({"default": "plain"}, tools=(TOOL,)) == "plain"


def test_a_model_without_a_default_template_says_so() -> None:
    with pytest.raises(BadRequestError, match="only rag, tool_use"):
        render({"rag": "a", "tool_use": "b"})


def test_arguments_are_parsed_for_a_template_that_writes_them_as_json() -> None:
    assert render(CALLS_AS_MAPPING, calling('{"b":1,  "a": [1.0, "<"]}')) == '{"b": 1, "a": [1.0, "<"]}'


def test_arguments_stay_text_byte_for_byte_for_a_template_that_takes_text() -> None:
    assert render(CALLS_AS_TEXT, calling('{"b":1,  "a": 1.0}')) == '[{"b":1,  "a": 1.0}]'


def test_arguments_that_are_no_json_object_are_given_as_they_are() -> None:
    assert render(CALLS_AS_MAPPING, calling('{"b": ')) == '"{\\"b\\": "'
    assert render(CALLS_AS_MAPPING, calling("[1]")) == '"[1]"'


def test_a_template_that_refuses_is_the_clients_error() -> None:
    with pytest.raises(BadRequestError, match="refuses these messages: only one system message") as caught:
        render("{{ raise_exception('only one system message') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    ["{{ messages[5].content.x }}", "{{ 'a' + 1 }}", "{{ 1 / 0 }}", "{% for i in 5 %}{% endfor %}", "{{ missing() }}"],
)
def test_a_template_that_fails_is_the_clients_error_too(source: str) -> None:
    with pytest.raises(BadRequestError, match="chat template"):
        render(source)


def test_a_template_that_runs_away_on_these_messages_is_refused() -> None:
    source = (
        "{% if messages[0].content == 'run' %}{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}"
        "{% endfor %}{% endif %}"
    )
    assert render(source) == ""
    with pytest.raises(BadRequestError, match="steps on these messages"):
        render(source, Message(role="user", content="run"))


def test_a_template_that_always_runs_away_ends_the_start() -> None:
    with pytest.raises(StartupError, match="steps"):
        ChatTemplate({"default": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"}, {})


def test_a_template_that_cannot_be_parsed_ends_the_start() -> None:
    with pytest.raises(StartupError, match="'default' can't be parsed: line 2"):
        ChatTemplate({"default": "a\n{% if %}"}, {})


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "strftime_now"])
def test_options_cannot_take_the_place_of_the_request(name: str) -> None:
    with pytest.raises(BadRequestError, match=f"chat_template_kwargs.{name}"):
        ChatTemplate({"default": CHATML}, {"bos_token": "<s>"}).render((USER,), (), {name: "x"})

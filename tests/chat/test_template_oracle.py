"""Our rendering against transformers', on templates that use what real ones use."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from sapwood_server.chat.messages import Message, ToolCall
from sapwood_server.chat.template import ChatTemplate

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": 'Finds <things> & "quotes", auch Ümlaute.',
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
        },
    },
)
TEMPLATES = {
    "a ChatML with tools in the system message": """
{%- set ns = namespace(system='', calls=0) %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- bos_token }}<|im_start|>system
{{ ns.system | trim }}
{%- if tools %}

# Tools
{% for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
{%- endif %}<|im_end|>
{% for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.previtem is defined and loop.previtem.role != 'tool' or loop.first %}<|im_start|>user{% endif %}
{{ '<response>' + message.content + '</response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}
    {%- else %}
<|im_start|>{{ message.role }}
{% generation %}{{ message.content }}{% endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {%- set ns.calls = ns.calls + 1 %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
        {%- endfor %}<|im_end|>
    {%- endif %}
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}{{ ns.calls }}
""",
    "loop controls, filters, macros and slices": """
{%- macro line(message, index) -%}
{{ '%d' | format(index) }}|{{ message['role'] | upper }}|{{ message['content'] | replace('a', 'A') | trim }}
{%- endmacro -%}
{%- for message in messages -%}
    {%- if loop.index0 == 0 and message['role'] == 'system' %}{% continue %}{% endif -%}
    {{ line(message, loop.index) }}{{ '\\n' }}
    {%- if loop.length > 40 %}{% break %}{% endif -%}
{%- endfor -%}
{{ messages[-2:] | map(attribute='role') | join(',') }}{{ (tools or []) | length }}{{ documents is none }}
{{- messages | selectattr('role', 'equalto', 'user') | list | length }}{{ range(3) | list | tojson }}
""",
}
MESSAGES = (
    Message(role="system", content=" You are <terse>. "),
    Message(role="user", content='a question & "another"'),
    Message(
        role="assistant",
        content="",
        tool_calls=(
            ToolCall(id="call00001", name="look_up", arguments='{"q": "<ü>", "n": [1, 2.5, null, true]}'),
            ToolCall(id="call00002", name="look_up", arguments="{}"),
        ),
    ),
    Message(role="tool", content="one", tool_call_id="call00001"),
    Message(role="tool", content="two", tool_call_id="call00002"),
    Message(role="user", content="banana"),
)


def hugging_face_messages() -> list[dict[str, Any]]:
    """The same conversation as Hugging Face's users write it: arguments are mappings."""
    plain: list[dict[str, Any]] = [{"role": message.role, "content": message.content} for message in MESSAGES]
    arguments: tuple[dict[str, Any], ...] = ({"q": "<ü>", "n": [1, 2.5, None, True]}, {})
    plain[2]["tool_calls"] = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": mapping}}
        for call, mapping in zip(MESSAGES[2].tool_calls, arguments, strict=True)
    ]
    plain[3]["tool_call_id"], plain[4]["tool_call_id"] = "call00001", "call00002"
    return plain


@pytest.mark.parametrize("tools", [(), TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str, tools: tuple[dict[str, Any], ...]) -> None:
    ours = ChatTemplate({"default": TEMPLATES[name]}, {"bos_token": "<s>"}).render(MESSAGES, tools, {})
    rendered: Any = render_jinja_template(
        conversations=[hugging_face_messages()],
        tools=list(tools) or None,
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        bos_token="<s>",
    )
    assert [ours] == rendered[0]
    assert "question" in ours

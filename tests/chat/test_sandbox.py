"""The templates' environment: Hugging Face's conventions, no clock, no way out, no end of memory."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from sapwood_server.chat import sandbox
from sapwood_server.chat.sandbox import MAX_STEPS, RunawayTemplateError, TemplateSandbox, render


def run(source: str, **variables: Any) -> str:
    """The template's text."""
    return render(TemplateSandbox().from_string(source), variables)


def test_blocks_are_trimmed_as_templates_expect() -> None:
    assert run("  {% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"


def test_tojson_escapes_no_html_and_keeps_order_and_unicode() -> None:
    assert run("{{ value | tojson }}", value={"b": "<ü>&'", "a": 1}) == '{"b": "<ü>&\'", "a": 1}'


def test_tojson_takes_the_options_that_templates_pass() -> None:
    text = run("{{ v | tojson(indent=1) }}{{ v | tojson(separators=(',', ':'), sort_keys=true) }}", v={"b": 1, "a": 2})
    assert text == '{\n "b": 1,\n "a": 2\n}{"a":2,"b":1}'


def test_loop_controls_work() -> None:
    assert run("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}") == "13"
    assert run("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"


def test_loop_variables_work_on_metered_loops() -> None:
    source = "{% for i in v %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}"
    assert run(source, v=["a", "b"]) == "1/2,2/2"
    assert run(source, v=(x for x in "ab")) == "1/2,2/2"


def test_a_loop_over_nothing_takes_its_else_branch() -> None:
    assert run("{% for i in missing %}x{% else %}none{% endfor %}") == "none"


def test_the_generation_tag_renders_its_body() -> None:
    assert run("a{% generation %}b{% endgeneration %}c") == "abc"


def test_raise_exception_is_a_template_error() -> None:
    with pytest.raises(jinja2.TemplateError, match="roles must alternate"):
        run("{{ raise_exception('roles must alternate') }}")


def test_the_date_is_pinned() -> None:
    assert run("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__self__.year }}",
    ],
)
def test_a_template_can_reach_neither_python_nor_its_input(source: str) -> None:
    messages: list[int] = []
    with pytest.raises(jinja2.exceptions.SecurityError):
        run(source, messages=messages)
    assert messages == []


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
    ids=["nested loops", "a macro that calls itself twice"],
)
def test_a_template_without_end_is_stopped(source: str) -> None:
    with pytest.raises(RunawayTemplateError, match=f"{MAX_STEPS} steps"):
        run(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 12 }}",
        "{{ [0] * 10 ** 12 }}",
        "{{ 2 ** 1000000 }}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    ],
)
def test_a_value_without_measure_is_refused_before_it_is_built(source: str) -> None:
    with pytest.raises(RunawayTemplateError):
        run(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(9) %}{% set ns.s = ns.s ~ (ns.s ~ '') %}{% endfor %}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(9) %}{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}"
        "{% set ns.s = s %}{% endfor %}",
        "{% macro f(s, n) %}{% if n %}{{ f(s ~ '!', n - 1) }}{{ f(s, n - 1) }}{% else %}{{ s }}{% endif %}"
        "{% endmacro %}{% if f('aaaaaaaa', 9) %}{% endif %}",
    ],
    ids=["~", "a block that is set", "a macro"],
)
def test_a_text_that_is_never_written_is_measured_too(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    assert run(source).strip() == ""
    monkeypatch.setattr(sandbox, "MAX_LENGTH", 1000)
    with pytest.raises(RunawayTemplateError, match="1000 characters"):
        run(source)


def test_texts_of_any_kind_are_joined() -> None:
    assert run("{{ 'a' ~ 1 ~ none ~ missing ~ ('b' ~ [2]) }}") == "a1Noneb[2]"


def test_a_text_without_measure_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_LENGTH", 1000)
    with pytest.raises(RunawayTemplateError, match="1000 characters"):
        run("{% for i in range(101) %}{{ 'aaaaaaaaaa' }}{% endfor %}")


def test_arithmetic_still_works() -> None:
    assert run("{{ 2 * 3 + 2 ** 5 }} {{ 'ab' * 2 + 'c' }} {{ [1] + [2] }}") == "38 ababc [1, 2]"


def test_the_meter_starts_anew_for_each_rendering() -> None:
    template = TemplateSandbox().from_string("{% for i in range(60000) %}{% endfor %}")
    for _ in range(MAX_STEPS // 60000 + 2):
        assert render(template, {}) == ""

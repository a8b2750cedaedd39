"""Few words of a template ask for gigabytes: refused before anything of that size is made."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import pytest

from disagg.errors import InvalidRequest, ModelError
from disagg.text import template_sandbox
from disagg.text.chat_template import ChatTemplate
from disagg.text.template_sandbox import MAX_NUM_CHARS, TemplateTooSlow

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "a\tb\nc" * 20}]


def render(source: str) -> str:
    return ChatTemplate(source, {}).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a'.center(4000000000) }}",
        "{{ 'a'.ljust(4000000000) }}",
        "{{ 'a'.rjust(4000000000, 'b') }}",
        "{{ '1'.zfill(4000000000) }}",
        "{{ messages[0].content.zfill(width) }}",
        "{{ ('a'|attr('ljust'))(4000000000) }}",
        "{{ 'a'.encode().ljust(4000000000) }}",
        "{{ (1).to_bytes(4000000000, 'big') }}",
        "{{ 'a\tb'.expandtabs(4000000000) }}",
        "{{ 'a'|center(4000000000) }}",
        "{{ ['a']|map('center', 4000000000)|list }}",
        "{{ 'a\nb'|indent(4000000000) }}",
        "{{ 'a'|indent(4000000000, first=true) }}",
        "{{ ('a\n' * 1000)|indent(width='x' * 1000000) }}",
        "{{ '%4000000000d'|format(1) }}",
        "{{ '%.4000000000f'|format(1.5) }}",
        "{{ '%*d'|format(4000000000, 1) }}",
        "{{ '{:4000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 4000000000) }}",
        "{{ '{a:4000000000}'.format_map({'a': 1}) }}",
        "{{ ('{0}' * 100000).format('a' * 1000000) }}",
        "{{ messages|tojson(indent=4000000000) }}",
        "{{ ([1] * 100000)|tojson(indent=60000) }}",
        "{{ ([1] * 100000)|tojson(separators=('a' * 60000, 'b')) }}",
        "{{ ([1] * 100000)|tojson(separators=['a' * 1000000, 'b']) }}",
        "{{ ([[1] * 1000000] * 10000)|sum(start=[]) }}",
        "{{ ([[1] * 1000000] * 10000)|map('list')|sum(none, []) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000)|replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000).replace('', 'b' * 1000000) }}",
        "{{ 'a'.translate({97: 'b' * 1000000}) }}",
        "{{ ('a' * 1000000).join(['b'] * 1000) }}",
        "{{ (['b'] * 1000)|join('a' * 1000000) }}",
        "{{ (['b'] * 100000)|join('a' * 100000) }}",
        "{{ ([{'a': 'b' * 1000000}] * 1000)|join(attribute='a') }}",
        "{{ ['a' * 1000000] * 100000 }}",
        "{{ (['a' * 1000000] * 100000)|string }}",
        "{{ (['a' * 1000000] * 100000)|upper }}",
        "{{ ([['a' * 1000000] * 1000] * 1000)|tojson }}",
        "{{ [1]|batch(4000000000, 1)|list }}",
        "{{ [1]|slice(4000000000, 1)|list }}",
        "{{ lipsum(n=4000000000) }}",
        "{{ 5|round(-1000000000) }}",
        "{{ 5|round(precision=1000000000, method='floor') }}",
        "{{ ('{' ~ ':' * 1000000).format(1) }}",  # looking for widths takes linear time
        "{{ strftime_now('%Y' * 100000) }}",
        "{{ (['a' * 1000000] * 100000)|max }}",
        "{{ ([{'a': 'b' * 1000000}] * 100000)|sort(attribute='a')|length }}",
        "{% set n = namespace(t='a') %}{% for i in range(60) %}"
        "{% set n.t = n.t ~ n.t %}{% endfor %}",
        "{% set n = namespace(t='a') %}{% for i in range(60) %}"
        "{% set n.t = n.t + n.t %}{% endfor %}",
        "{% set n = namespace(t=[1]) %}{% for i in range(60) %}"
        "{% set n.t = n.t + n.t %}{% endfor %}",
        "{% set n = namespace(t='a') %}{% for i in range(60) %}{% set t %}{{ n.t }}{{ n.t }}"
        "{% endset %}{% set n.t = t %}{% endfor %}",
        "{% macro m(t) %}{{ t }}{{ t }}{% endmacro %}{% set n = namespace(t='a') %}"
        "{% for i in range(60) %}{% set n.t = m(n.t) %}{% endfor %}",
    ],
)
def test_a_text_of_gigabytes_is_refused_before_it_is_made(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest):
            render(source)
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_NUM_CHARS
    finally:
        tracemalloc.stop()


def test_what_refers_to_itself_many_times_is_not_looked_at_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Written out it would have 2 ** 60 values, and few characters where looking becomes slow."""
    monkeypatch.setattr(template_sandbox, "_MAX_ITEMS", 1 << 10)
    doubled = "{% set n = namespace(t=[1]) %}{% for i in range(60) %}{% set n.t = [n.t, n.t] %}"
    with pytest.raises(InvalidRequest, match="more than 1024 items"):
        render(doubled + "{% endfor %}{{ n.t|tojson }}")


@pytest.mark.parametrize("name", ["urlize", "pprint", "striptags", "wordwrap"])
def test_filters_that_are_of_no_use_for_a_prompt_are_not_there(name: str) -> None:
    with pytest.raises(ModelError, match=name):
        render(f"{{{{ 'a'|{name} }}}}")


@pytest.mark.parametrize(
    "source",
    [
        "{% set x = messages|length %}" * 20,
        "{% set x = messages[0].content.upper() %}" * 20,
        "{{ range(20)|select('even')|list }}",
        "{{ range(20)|map('string')|list }}",
        "{% for x in range(20) %}{% endfor %}",
    ],
)
def test_time_is_looked_at_all_along(source: str) -> None:
    """By a clock on which a second passes at each look."""
    template = ChatTemplate(source, {}, timer=itertools.count().__next__)
    template.render(MESSAGES, limit_s=100)
    with pytest.raises(TemplateTooSlow):
        template.render(MESSAGES, limit_s=10)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}{{ ''|attr('__class__') }}{{ ['']|map(attribute='__class__')|first }}",
        "{{ '{0.__class__}'.format('') }}{{ ('{0.__class__}'|attr('format'))('') }}",
        "{{ (['{0.__class__}']|map(attribute='format')|first)('') }}",
        "{{ strftime_now.__globals__ }}{{ strftime_now|attr('__closure__') }}",
    ],
)
def test_what_python_is_made_of_is_not_there(source: str) -> None:
    assert render(source) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ cycler.__init__.__globals__ }}",
        "{{ '{a.__class__.__mro__}'.format_map({'a': ''}) }}",
        "{{ messages.append(1) }}",
        "{% include 'x' %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{{ cycler().next() }}",
    ],
)
def test_whatever_fails_is_a_refusal(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source)


def test_the_refusal_says_why() -> None:
    with pytest.raises(InvalidRequest, match="a width is above 65536"):
        render("{{ 'a'.ljust(4000000000) }}")
    with pytest.raises(InvalidRequest, match="a text would be longer than 33554432 characters"):
        render("{{ ['a' * 1000000] * 100000 }}")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a'.center(5) }}|{{ 'a'|center(5) }}|{{ 'a'.ljust(3, '.') }}", "  a  |  a  |a.."),
        ("{{ 'a'.rjust(3) }}|{{ '7'.zfill(3) }}|{{ 'a\tb'.expandtabs(4) }}", "  a|007|a   b"),
        ("{{ 'a\nb'|indent(2) }}|{{ 'a\nb'|indent('--', true) }}", "a\n  b|--a\n--b"),
        ("{{ '**%s** of 100000: %05.2f%%'|format('a', 1.5) }}", "**a** of 100000: 01.50%"),
        ("{{ '{:>4} of 100000 {{{a}}}'.format(1, a=2) }}", "   1 of 100000 {2}"),
        ("{{ ['a', 1, none]|join(', ') }}|{{ ','.join('ab'|map('upper')) }}", "a, 1, None|A,B"),
        ("{{ [{'a': {'b': 1}}, {'a': {'b': 2}}]|join('+', attribute='a.b') }}", "1+2"),
        ("{{ 'aXbX'.replace('X', '-') }}|{{ 'aXbX'|replace('X', '-', 1) }}", "a-b-|a-bX"),
        ("{{ 'a' ~ 1 ~ none ~ missing ~ [2] }}", "a1None[2]"),
        ("{{ 'a' + 'b' }}|{{ [1] + [2] }}", "ab|[1, 2]"),
        ("{{ [1, 2, 3]|batch(2, 0)|list }}|{{ 2.345|round(1) }}", "[[1, 2], [3, 0]]|2.3"),
        ("{{ [2, 1]|sort }}|{{ ['b', 'a']|max }}|{{ 'a'|upper|lower }}", "[1, 2]|b|a"),
        ("{{ {'a': [1]}|tojson(indent=1) }}", '{\n "a": [\n  1\n ]\n}'),
        ("{{ [1, 2.5]|sum }}|{{ [{'a': 1}]|sum('a') }}", "3.5|1"),
        ("{{ [1, {'a': 2}]|tojson(separators=(',', ':')) }}", '[1,{"a":2}]'),
        ("{{ missing }}|{{ none }}|{{ {'a': 1} }}", "|None|{'a': 1}"),
    ],
)  # fmt: skip
def test_ordinary_ones_are_made_as_ever(source: str, text: str) -> None:
    assert render(source) == text

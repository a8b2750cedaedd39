"""Numbers in a template that ask for gigabytes, endless loops, Python's own attributes: refused."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import pytest

from disagg.errors import InvalidRequest
from disagg.text.chat_template import MAX_NUM_CHARS, ChatTemplate, TemplateTooSlow

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
        "{{ ('a'|attr('ljust'))(4000000000) }}",
        "{{ 'a'.encode().ljust(4000000000) }}",
        "{{ (1).to_bytes(4000000000, 'big') }}",
        "{{ 'a\tb'.expandtabs(4000000000) }}",
        "{{ 'a'|center(4000000000) }}",
        "{{ ['a']|map('center', 4000000000)|list }}",
        "{{ 'a\nb'|indent(4000000000) }}",
        "{{ 'a'|indent(4000000000, first=true) }}",
        "{{ '%4000000000d'|format(1) }}",
        "{{ '%.4000000000f'|format(1.5) }}",
        "{{ '%*d'|format(4000000000, 1) }}",
        "{{ '{:4000000000}'.format(1) }}",
        "{{ '{a:4000000000}'.format_map({'a': 1}) }}",
        "{{ messages|tojson(indent=4000000000) }}",
        "{{ [1]|batch(4000000000, 1)|list }}",
        "{{ [1]|slice(4000000000, 1)|list }}",
        "{{ lipsum(n=4000000000) }}",
        "{{ 'a' * 4000000000 }}",
        "{{ '%4000000000d' % 1 }}",
        "{{ 5|round(-1000000000) }}",
        "{{ 5|round(precision=1000000000, method='floor') }}",
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
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ strftime_now.__globals__['os'] }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ 10 ** 1000000000 }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
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


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("m.content.replace('a', 'b')", "b7"),
        ("m.content.center(4)", " a7 "),
        ("'{:>3}'.format(m.content)", " a7"),
        ("'%3s' % m.content", " a7"),
        ("m.content|center(4)", " a7 "),
    ],
)
def test_methods_of_texts_in_loops_and_blocks(expression: str, text: str) -> None:
    """Jinja passes variables of loops and blocks along with the arguments of a call."""
    for around in (
        "{%% for m in messages %%}{{ %s }}{%% endfor %%}",
        "{%% block b %%}{%% for m in messages %%}{{ %s }}{%% endfor %%}{%% endblock %%}",
        "{%% block b %%}{%% set m = messages[0] %%}{{ %s }}{%% endblock %%}",
        "{%% macro f(m) %%}{{ %s }}{%% endmacro %%}{{ f(messages[0]) }}",
    ):
        assert ChatTemplate(around % expression, {}).render([{"content": "a7"}]) == text

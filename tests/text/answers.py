"""Reads answers as requests do, whole or cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from disagg.text.answer_delta import Tools
from disagg.text.answer_reader import AnswerReader, AnswerSyntax, reasoning_format_of
from disagg.text.tool_parsers.registry import tool_format_of

TOOLS: Tools = {
    "look": {
        "type": "object",
        "properties": {
            "where": {"type": "string"},
            "n": {"type": "integer"},
            "deep": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "place": {"type": "object"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "rest": {"type": "object", "properties": {}},
    "only": {
        "type": "object",
        "properties": {"code": {"type": "string"}},
        "additionalProperties": False,
    },
}


class Found(NamedTuple):
    """All that was found in an answer."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name and arguments, as they were written


def syntax_of(
    tool_parser: str = "", reasoning_parser: str = "", *, parallel: bool = True
) -> AnswerSyntax:
    form = tool_format_of(None, tool_parser) if tool_parser else None
    reasoning = reasoning_format_of("", reasoning_parser) if reasoning_parser else None
    return AnswerSyntax(reasoning, form, TOOLS, parallel=parallel)


def read(syntax: AnswerSyntax, pieces: Sequence[str], prompt_tail: str = "") -> Found:
    reader = AnswerReader(syntax, "answer", prompt_tail)
    reasoning = text = ""
    calls: list[tuple[str, str]] = []
    ids = set()
    for index, piece in enumerate(pieces):
        delta = reader.push(piece, is_end=index == len(pieces) - 1)
        reasoning, text = reasoning + delta.reasoning, text + delta.text
        for call in delta.calls:
            if call.name:
                assert call.number == len(calls) and call.id not in ids
                ids.add(call.id)
                calls.append((call.name, ""))
            assert call.number == len(calls) - 1 and bool(call.id) == bool(call.name)
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    return Found(reasoning, text, tuple(calls))


def cut(answer: str, places: Sequence[int]) -> list[str]:
    """`answer` in pieces, some of them perhaps empty."""
    ends = [0, *sorted(min(place, len(answer)) for place in places), len(answer)]
    return [answer[a:b] for a, b in pairwise(ends)]

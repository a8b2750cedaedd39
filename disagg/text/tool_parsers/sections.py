"""Calls in a separate section, each with a head, a separator and JSON: DeepSeek, Kimi K2."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from disagg.text.answer_delta import Sink
from disagg.text.incoming import Incoming, Marks, Reading, ignore
from disagg.text.tool_parsers.format import Tools, read_marked

_LINE = re.compile(r"[^\n<]")


class SectionMarks(NamedTuple):
    section_begin: str
    section_end: str
    call_begin: str
    call_end: str
    separator: str


DEEPSEEK = SectionMarks(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
KIMI_K2 = SectionMarks(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)


def read_deepseek(text: Incoming, sink: Sink, tools: Tools) -> Reading[None]:
    """Read calls of DeepSeek.

    V3 and R1 write the name after the separator, and JSON in a code block; V3.1 writes the name
    before the separator.
    """

    def call(head: str) -> Reading[bool]:
        name = head
        if (yield from text.spaces()) != "{":
            name = (yield from text.word(_LINE)).strip()
            yield from text.spaces()
            yield from text.skip("```json")
            yield from text.spaces()
        return (yield from _read_json(text, sink, name))

    yield from _read(text, sink, DEEPSEEK, call)


def read_kimi_k2(text: Incoming, sink: Sink, tools: Tools) -> Reading[None]:
    """Read calls of Kimi K2, whose head is the call's id, `functions.NAME:NUMBER`."""

    def call(head: str) -> Reading[bool]:
        yield from text.spaces()
        name = head.rpartition(":")[0].removeprefix("functions.") or head
        return (yield from _read_json(text, sink, name, head))

    yield from _read(text, sink, KIMI_K2, call)


def _read(
    text: Incoming, sink: Sink, marks: SectionMarks, read_call: Callable[[str], Reading[bool]]
) -> Reading[None]:
    ends = Marks(marks.call_end, marks.section_end)

    def calls(mark: str) -> Reading[bool]:
        is_call = False
        while True:
            if mark == marks.section_begin:
                yield from text.spaces()
                if not (yield from text.skip(marks.call_begin)):
                    break
            head = (yield from text.word(_LINE)).strip()
            if not head or not (yield from text.skip(marks.separator)):
                return is_call
            if not (yield from read_call(head)):
                return is_call
            is_call = True
            yield from text.until(ends, ignore)
            mark = marks.section_begin
        yield from text.skip(marks.section_end)
        return is_call

    yield from read_marked(text, sink, Marks(marks.section_begin, marks.call_begin), calls)


def _read_json(text: Incoming, sink: Sink, name: str, call_id: str = "") -> Reading[bool]:
    """Read the arguments of a call, if there are any."""
    if not name:
        return False
    sink.begin_call(name, call_id)
    is_whole = True
    if (yield from text.next()) == "{":
        is_whole = yield from text.json_value(sink.arguments)
    if is_whole:
        sink.end_call()
    return True

"""GLM's calls: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

from __future__ import annotations

import re

from disagg.text.answer_delta import Sink
from disagg.text.incoming import Incoming, Marks, Reading
from disagg.text.tool_parsers.format import Tools, read_marked
from disagg.text.tool_parsers.named_arguments import NamedArguments

_BEGIN = Marks("<tool_call>")
_NAME = re.compile(r"[^<\s]")
_KEY_END = Marks("</arg_key>")
_VALUE_END = Marks("</arg_value>")


def read_glm45(text: Incoming, sink: Sink, tools: Tools) -> Reading[None]:
    """Read the calls of GLM 4.5 to 4.7, which differ in white space between marks."""

    def call(mark: str) -> Reading[bool]:
        yield from text.spaces()
        name = yield from text.word(_NAME)
        yield from text.spaces()
        is_empty = yield from text.skip("</tool_call>")
        if not name or not (is_empty or (yield from text.skip("<arg_key>"))):
            return False
        sink.begin_call(name)
        arguments = NamedArguments(sink, tools.get(name))
        if is_empty or (yield from _read_arguments(text, arguments)):
            arguments.close()
        return True

    yield from read_marked(text, sink, _BEGIN, call)


def _read_arguments(text: Incoming, arguments: NamedArguments) -> Reading[bool]:
    """Read arguments after `<arg_key>`; returns whether they are complete."""
    has_more = True
    while has_more:
        key, mark = yield from text.collect(_KEY_END)
        yield from text.spaces()
        if not mark or not (yield from text.skip("<arg_value>")):
            return False
        arguments.begin(key.strip())
        if not (yield from text.until(_VALUE_END, arguments.add)):
            return False
        arguments.end()
        yield from text.spaces()
        has_more = yield from text.skip("<arg_key>")
    return (yield from text.skip("</tool_call>"))

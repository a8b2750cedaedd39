"""Qwen3-Coder's calls: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function>`."""

from __future__ import annotations

import re

from disagg.text.answer_delta import Sink
from disagg.text.incoming import Incoming, Marks, Reading
from disagg.text.tool_parsers.format import Tools, read_marked
from disagg.text.tool_parsers.named_arguments import NamedArguments

_BEGIN = Marks("<tool_call>", "<function=")  # models may forget the first mark
_NAME = re.compile(r"[^>\n]")
# Values are between line breaks; models may forget marks at the end.
_VALUE_END = Marks(*(
    line + mark
    for line in ("", "\n")
    for mark in ("</parameter>", "<parameter=", "</function>", "</tool_call>")
))  # fmt: skip


def read_qwen3_coder(text: Incoming, sink: Sink, tools: Tools) -> Reading[None]:
    def call(mark: str) -> Reading[bool]:
        if mark == "<tool_call>":
            yield from text.spaces()
            if not (yield from text.skip("<function=")):
                return False
        name = (yield from text.word(_NAME)).strip()
        if not name or not (yield from text.skip(">")):
            return False
        sink.begin_call(name)
        arguments = NamedArguments(sink, tools.get(name))
        if (yield from _read_arguments(text, arguments)):
            arguments.close()
            yield from text.spaces()
            yield from text.skip("</tool_call>")
        return True

    yield from read_marked(text, sink, _BEGIN, call)


def _read_arguments(text: Incoming, arguments: NamedArguments) -> Reading[bool]:
    """Read the arguments of a call; returns whether they are complete."""
    mark = ""
    while not mark.endswith(("</function>", "</tool_call>")):
        if not mark.endswith("<parameter="):
            if (yield from text.spaces()) != "<":
                return False
            if (yield from text.skip("</function>")):
                return True
            if not (yield from text.skip("<parameter=")):
                return False
        arguments.begin((yield from text.word(_NAME)).strip())
        yield from text.skip(">")
        yield from text.skip("\n")
        mark = yield from text.until(_VALUE_END, arguments.add)
        if not mark:
            return False
        arguments.end()
    return True

"""MiniMax-M2's calls, several in a section:
`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`."""

from __future__ import annotations

import re

from disagg.text.answer_delta import Sink
from disagg.text.incoming import Incoming, Marks, Reading
from disagg.text.tool_parsers.format import Tools, read_marked
from disagg.text.tool_parsers.named_arguments import NamedArguments

SECTION = "<minimax:tool_call>"
SECTION_END = "</minimax:tool_call>"
_INVOKE, _INVOKE_END = "<invoke name=", "</invoke>"
_PARAMETER, _PARAMETER_END = "<parameter name=", "</parameter>"
_BEGIN = Marks(SECTION, _INVOKE)  # the second call of a section begins with _INVOKE
_NAME = re.compile(r"[^>\n]")
_VALUE_END = Marks(_PARAMETER_END, _INVOKE_END, SECTION_END)


def read_minimax_m2(text: Incoming, sink: Sink, tools: Tools) -> Reading[None]:
    def call(mark: str) -> Reading[bool]:
        if mark == SECTION:
            yield from text.spaces()
            if not (yield from text.skip(_INVOKE)):
                return False
        name = yield from _read_name(text)
        if not name:
            return False
        sink.begin_call(name)
        arguments = NamedArguments(sink, tools.get(name))
        if (yield from _read_arguments(text, arguments)):
            arguments.close()
            yield from text.spaces()
            yield from text.skip(SECTION_END)
        return True

    yield from read_marked(text, sink, _BEGIN, call)


def _read_name(text: Incoming) -> Reading[str]:
    """Read a name in quotation marks and the `>` after it; "" if it is missing."""
    name = (yield from text.word(_NAME)).strip().strip("\"'")
    return name if (yield from text.skip(">")) else ""


def _read_arguments(text: Incoming, arguments: NamedArguments) -> Reading[bool]:
    """Read the arguments of a call; returns whether they are complete."""
    while True:
        if (yield from text.spaces()) != "<":
            return False
        if (yield from text.skip(_INVOKE_END)):
            return True
        if not (yield from text.skip(_PARAMETER)):
            return False
        arguments.begin((yield from _read_name(text)))
        mark = yield from text.until(_VALUE_END, arguments.add)
        if not mark:
            return False
        arguments.end()
        if mark != _PARAMETER_END:  # models may forget marks at the end
            return True

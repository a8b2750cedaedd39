"""Mistral's calls: `[TOOL_CALLS]`, then a list of JSON objects, or a name and its arguments."""

from __future__ import annotations

import re

from disagg.text.answer_delta import Sink
from disagg.text.incoming import Incoming, Marks, Reading
from disagg.text.tool_parsers.format import Tools, read_marked
from disagg.text.tool_parsers.json_calls import read_json_calls

_BEGIN = Marks("[TOOL_CALLS]")
_NAME = re.compile(r"[A-Za-z0-9_.-]")


def read_mistral(text: Incoming, sink: Sink, tools: Tools) -> Reading[None]:
    """Earlier models write `[TOOL_CALLS][{...}, ...]`, later ones `[TOOL_CALLS]name[ARGS]{...}`."""

    def calls(mark: str) -> Reading[bool]:
        if (yield from text.spaces()) in ("[", "{"):
            return (yield from read_json_calls(text, sink))
        name = yield from text.word(_NAME)
        call_id = ""
        if (yield from text.skip("[CALL_ID]")):
            call_id = yield from text.word(_NAME)
        yield from text.skip("[ARGS]")
        if not name or (yield from text.spaces()) != "{":
            return False
        sink.begin_call(name, call_id)
        if (yield from text.json_value(sink.arguments)):
            sink.end_call()
        return True

    yield from read_marked(text, sink, _BEGIN, calls)

"""Calls as a Python list: `[get_weather(city="Paris", days=2), get_time()]`; Llama 3.2 and 4."""

from __future__ import annotations

import re

from disagg.text.answer_delta import Sink
from disagg.text.incoming import Incoming, Reading
from disagg.text.tool_parsers.format import read_text
from disagg.text.tool_parsers.named_arguments import NamedArguments
from disagg.text.value_end import PythonEnd

_NAME = re.compile(r"[A-Za-z0-9_.-]")
_BEGIN, _END = "<|python_start|>", "<|python_end|>"  # marks of Llama 4


def read_pythonic(text: Incoming, sink: Sink) -> Reading[None]:
    """Read calls. An answer that does not begin with a list of calls is text."""
    text.record()
    yield from text.spaces()
    yield from text.skip(_BEGIN)
    yield from text.spaces()
    is_whole = has_more = yield from text.skip("[")
    while has_more:
        is_whole = yield from _read_call(text, sink)
        if is_whole:
            text.record()
            yield from text.spaces()
            has_more = yield from text.skip(",")
        else:
            has_more = False
    if is_whole:
        yield from text.skip("]")
        yield from text.spaces()
        yield from text.skip(_END)
    yield from read_text(text, sink, "" if is_whole else text.recorded())


def _read_call(text: Incoming, sink: Sink) -> Reading[bool]:
    """Read a call; returns whether it was one."""
    yield from text.spaces()
    name = yield from text.word(_NAME)
    if not (yield from text.skip("(")):
        return False
    arguments: NamedArguments | None = None
    while (char := (yield from text.spaces())) not in (")", ""):
        if char == "," and arguments is not None:
            yield from text.skip(",")
            continue
        key = yield from text.word(_NAME)
        yield from text.spaces()
        if not key or not (yield from text.skip("=")):
            return arguments is not None
        if arguments is None:
            if not sink.begin_call(name):
                return False
            arguments = NamedArguments(sink, None)
        arguments.begin(key)
        yield from text.spaces()
        if not (yield from text.value(PythonEnd(), arguments.add)):
            return True
        arguments.end()
    if not char:
        return arguments is not None
    yield from text.skip(")")
    if arguments is None and not sink.begin_call(name):
        return False
    sink.end_call()
    return True

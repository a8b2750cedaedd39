"""Calls as a Python list: `[get_weather(city="Paris", days=2), get_time()]`; Llama 3.2 and 4."""

from __future__ import annotations

import re

from disagg.text.answer_delta import Sink
from disagg.text.incoming import Incoming, Reading
from disagg.text.tool_parsers.format import Tools, read_text
from disagg.text.tool_parsers.named_arguments import NamedArguments
from disagg.text.value_end import PythonEnd

_NAME = re.compile(r"[A-Za-z0-9_.-]")
_BEGIN, _END = "<|python_start|>", "<|python_end|>"  # marks of Llama 4


def read_pythonic(text: Incoming, sink: Sink, tools: Tools) -> Reading[None]:
    """Read calls. An answer that does not begin with a list of calls of known functions is text."""
    text.record()
    yield from text.spaces()
    yield from text.skip(_BEGIN)
    is_call = False
    if (yield from text.skip("[")):
        while (yield from _read_call(text, sink, tools)):
            is_call = True
            if (yield from text.spaces()) != ",":
                break
            yield from text.skip(",")
    if is_call:
        yield from text.skip("]")
        yield from text.skip(_END)
    read = text.recorded()
    yield from read_text(text, sink, "" if is_call else read)


def _read_call(text: Incoming, sink: Sink, tools: Tools) -> Reading[bool]:
    """Read a call; returns whether one has begun."""
    yield from text.spaces()
    name = yield from text.word(_NAME)
    if name not in tools or not (yield from text.skip("(")):
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
            sink.begin_call(name)
            arguments = NamedArguments(sink, None)
        arguments.begin(key)
        yield from text.spaces()
        if not (yield from text.value(PythonEnd(), arguments.add)):
            return True
        arguments.end()
    if not char:
        return arguments is not None
    yield from text.skip(")")
    if arguments is None:
        sink.begin_call(name)
        arguments = NamedArguments(sink, None)
    arguments.close()
    return True

"""Calls whose arguments are literals of a language: Python's of Llama 4 and LFM2, and Gemma's.

`[get_weather(city="Paris", days=2), get_time()]`, `call:get_weather{city:<|"|>Paris<|"|>,days:2}`.
"""

from __future__ import annotations

import json
import re

from disagg.text.answer_delta import Marked, Sink, marks_of, read_text
from disagg.text.incoming import Incoming, Reading, Take
from disagg.text.tool_parsers.tags import NamedArguments, json_of

_NAME = re.compile(r"[A-Za-z0-9_.-]")
_BEGIN, _END = "<|python_start|>", "<|python_end|>"  # marks of Llama 4


def read_pythonic(text: Incoming, sink: Sink) -> Reading[None]:
    """Read calls. An answer that does not begin with a list of calls is text."""
    text.record()
    yield from text.skip_spaced(_BEGIN)
    is_whole = yield from _read_list(text, sink)
    if is_whole:
        yield from text.skip_spaced(_END)
    yield from read_text(text, sink, "" if is_whole else text.take_record())


def _lfm2(text: Incoming, sink: Sink, mark: str) -> Reading[bool]:
    is_whole = yield from _read_list(text, sink)
    if is_whole:
        yield from text.skip_spaced("<|tool_call_end|>")
    return is_whole


read_lfm2 = Marked(("<|tool_call_start|>",), _lfm2)


def _read_list(text: Incoming, sink: Sink) -> Reading[bool]:
    """Read a list of calls; returns whether it was one, to its end."""
    is_whole = has_more = yield from text.skip_spaced("[")
    while has_more:
        is_whole = yield from _read_call(text, sink)
        if is_whole:
            text.record()
            has_more = yield from text.skip_spaced(",")
        else:
            has_more = False
    if is_whole:
        yield from text.skip("]")
    return is_whole


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
        if not (yield from text.value(arguments.add, is_json=False)):
            return True
        arguments.end()
    if not char:
        return arguments is not None
    yield from text.skip(")")
    if arguments is None and not sink.begin_call(name):
        return False
    sink.end_call()
    return True


# The marks around a call, and the quotation mark of texts.
GEMMA_4 = ("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = ("<start_function_call>", "<end_function_call>", "<escape>")
_WORD = re.compile(r"[^,:{}\[\]<\n]")
_CLOSING = {"{": "}", "[": "]"}


def read_braces(begin: str, end: str, quote: str) -> Marked:
    """Reads calls as Gemma writes them: `call:NAME{KEY:VALUE,...}` between `begin` and `end`."""

    def read_call(text: Incoming, sink: Sink, mark: str) -> Reading[bool]:
        yield from text.skip_spaced("call:")
        name = yield from text.word(_NAME)
        if (yield from text.spaces()) != "{" or not sink.begin_call(name):
            return False
        if (yield from _read_braces(text, sink.arguments, quote)):
            sink.end_call()
            yield from text.skip_spaced(end)
        return True

    return Marked((begin,), read_call)


def _read_braces(text: Incoming, take: Take, quote: str) -> Reading[bool]:
    """Convert a value, which begins with a brace, to JSON; returns whether it ended."""
    open_ends: list[str] = []
    while char := (yield from text.spaces()):
        if (yield from text.skip(quote)):
            take('"')
            if not (yield from text.until(marks_of((quote,)), lambda part: take(_quote(part)))):
                return False
            take('"')
            continue
        if char not in "{[}],:":
            word = (yield from text.word(_WORD)).strip()
            if not word:
                return False
            is_key = (yield from text.spaces()) == ":"
            take(f'"{_quote(word)}"' if is_key else json_of(word))
            continue
        yield from text.skip(char)
        if char in _CLOSING:
            take(char)
            open_ends.append(_CLOSING[char])
        elif char in ",:":
            take(f"{char} ")
        else:
            take(open_ends.pop())
            if not open_ends:
                return True
    return False


def _quote(text: str) -> str:
    """Text as part of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]

"""Calls as JSON objects with a name and arguments, or as lists of them, as in most formats."""

from __future__ import annotations

from collections.abc import Container

from disagg.text.answer_delta import Sink
from disagg.text.incoming import Incoming, Marks, Reading, Take, ignore
from disagg.text.tool_parsers.format import Tools, read_marked, read_text

_PYTHON_TAG = "<|python_tag|>"  # Llama's, before some calls


def read_llama3_json(text: Incoming, sink: Sink, tools: Tools) -> Reading[None]:
    """Read the calls of Llama 3.1 and later, or of any model whose answer a grammar restricts.

    An answer that begins with the JSON of a call of an offered function has calls; any other is
    text.
    """
    text.record()
    yield from text.spaces()
    yield from text.skip(_PYTHON_TAG)
    is_call = yield from read_json_calls(text, sink, tools)
    read = text.recorded()
    yield from read_text(text, sink, "" if is_call else read)


def read_hermes(text: Incoming, sink: Sink, tools: Tools) -> Reading[None]:
    """Read calls between `<tool_call>` and `</tool_call>`: Hermes, Qwen2.5, Qwen3, Granite 4."""

    def calls(mark: str) -> Reading[bool]:
        return (yield from read_json_calls(text, sink, end="</tool_call>"))

    yield from read_marked(text, sink, _HERMES, calls)


def read_granite(text: Incoming, sink: Sink, tools: Tools) -> Reading[None]:
    """Read a list of calls after a mark: Granite 3, Phi-4-mini."""

    def calls(mark: str) -> Reading[bool]:
        return (yield from read_json_calls(text, sink, end=_GRANITE_ENDS[mark]))

    yield from read_marked(text, sink, _GRANITE, calls)


_HERMES = Marks("<tool_call>")
_GRANITE_ENDS = {"<|tool_call|>": "<|/tool_call|>", "<tool_call>": "</tool_call>"}
_GRANITE = Marks(*_GRANITE_ENDS)


def read_json_calls(
    text: Incoming, sink: Sink, names: Container[str] | None = None, end: str = ""
) -> Reading[bool]:
    """Read one call, several, or a list of them; returns whether one has begun.

    Args:
        names: names of the functions; JSON with another name is not a call. None allows any name.
        end: the mark after the calls, which models may forget.
    """
    is_call = is_list = False
    while char := (yield from text.spaces()):
        if char == "{":
            if not (yield from _read_call(text, sink, names)):
                return is_call
            is_call = True
        elif char == "[" and not (is_list or is_call):
            is_list = yield from text.skip("[")
        elif is_call and char in (",", "]") and is_list:
            yield from text.skip(char)
            is_list = char == ","
        elif is_call and char == ";":  # Llama's separator between calls
            yield from text.skip(char)
        else:
            break
    if is_call and end:
        yield from text.skip(end)
    return is_call


def _read_call(text: Incoming, sink: Sink, names: Container[str] | None) -> Reading[bool]:
    """Read a call, whose keys may come in any order. It begins when its name is known."""
    yield from text.skip("{")
    name: str | None = None
    early: list[str] | None = None  # arguments that arrived before the name
    has_begun = False
    while (char := (yield from text.spaces())) not in ("}", ""):
        if char == ",":
            yield from text.skip(char)
            continue
        key = yield from text.json_string()
        if key is None or (yield from text.spaces()) != ":":
            return has_begun
        yield from text.skip(":")
        yield from text.spaces()
        if key == "name" and name is None:
            name = yield from text.json_string()
            if name is None or (names is not None and name not in names):
                return False
            if early is not None:
                sink.begin_call(name)
                sink.arguments("".join(early))
                has_begun = True
        elif key in ("arguments", "parameters") and early is None and not has_begun:
            if not _are_arguments((yield from text.next())):
                return False
            if name is None:
                early = []
                yield from _read_arguments(text, early.append)
            else:
                sink.begin_call(name)
                has_begun = True
                yield from _read_arguments(text, sink.arguments)
        else:
            yield from text.json_value(ignore)
    if char != "}":
        return has_begun
    yield from text.skip("}")
    if name is None:
        return False
    if not has_begun:
        sink.begin_call(name)
    sink.end_call()
    return True


def _are_arguments(char: str) -> bool:
    """Whether a value may be arguments, by its first character: an object, a string or null."""
    return char in ("{", '"', "n")


def _read_arguments(text: Incoming, take: Take) -> Reading[None]:
    char = yield from text.next()
    if char == "{":
        yield from text.json_value(take)
    elif char == '"':
        take((yield from text.json_string()) or "")
    else:
        yield from text.json_value(ignore)

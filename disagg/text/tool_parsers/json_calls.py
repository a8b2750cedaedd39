"""Calls whose arguments are JSON: of Hermes, Llama 3, Granite, Mistral, DeepSeek, Kimi K2, Cohere,
Functionary.

Most are JSON objects with a name and arguments, or lists of them. Others have the name before the
arguments, between marks. White space between marks is ignored.
"""

from __future__ import annotations

import functools
import re

from disagg.text.answer_delta import Marked, Sink, read_text
from disagg.text.incoming import Incoming, Reading, Take, ignore

_PYTHON_TAG = "<|python_tag|>"  # Llama's, before some calls
_NAME = re.compile(r"[A-Za-z0-9_.-]")
_LINE = re.compile(r"[^\n<]")
_NUMBER = re.compile(r"[:_]\d+$")


def read_llama3_json(text: Incoming, sink: Sink) -> Reading[None]:
    """Read the calls of Llama 3.1 and later, or of any model whose answer a grammar restricts.

    An answer that begins with the JSON of a call has calls; any other is text.
    """
    text.record()
    yield from text.skip_spaced(_PYTHON_TAG)
    is_whole = yield from _read_json_calls(text, sink)
    yield from read_text(text, sink, "" if is_whole else text.take_record())


# Marks before calls, and the marks after them, which models may forget; "" for none.
MARK_ENDS = {
    "<tool_call>": "</tool_call>",
    "<|tool_call|>": "<|/tool_call|>",
    "<tool_calls>": "</tool_calls>",
    "<TOOLCALL>": "</TOOLCALL>",
    "<|START_ACTION|>": "<|END_ACTION|>",
    "<|function_call|>": "",
    "function call<|role_sep|>": "",
}


@functools.cache
def read_marked_json(begins: tuple[str, ...]) -> Marked:
    """Reads a call, several, or a list of them after one of these marks."""
    return Marked(begins, lambda text, sink, mark: _read_json_calls(text, sink, MARK_ENDS[mark]))


def _mistral(text: Incoming, sink: Sink, mark: str) -> Reading[bool]:
    """Earlier models write `[TOOL_CALLS][{...}, ...]`, later ones `[TOOL_CALLS]name[ARGS]{...}`."""
    if (yield from text.spaces()) in ("[", "{"):
        return (yield from _read_json_calls(text, sink))
    name = yield from text.word(_NAME)
    call_id = ""
    if (yield from text.skip_spaced("[CALL_ID]")):
        yield from text.spaces()
        call_id = yield from text.word(_NAME)
        yield from text.spaces()
    yield from text.skip("[ARGS]")
    if (yield from text.spaces()) != "{" or not sink.begin_call(name, call_id):
        return False
    yield from _read_object(text, sink)
    return True


read_mistral = Marked(("[TOOL_CALLS]",), _mistral)


def _functionary(text: Incoming, sink: Sink, mark: str) -> Reading[bool]:
    """`<function=NAME>{...}</function>`, also the format of Llama 3.1's own prompts."""
    name = yield from text.word(_NAME)
    if not (yield from text.skip(">")):
        return False
    if (yield from text.spaces()) != "{" or not sink.begin_call(name):
        return False
    yield from _read_object(text, sink)
    yield from text.skip_spaced("</function>")
    return True


read_functionary = Marked(("<function=",), _functionary)


# Marks of a section of calls: around the section, around a call, between its head and arguments.
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>", "<｜tool▁sep｜>")  # fmt: skip
KIMI_K2 = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
           "<|tool_call_end|>", "<|tool_call_argument_begin|>")  # fmt: skip


def _deepseek(text: Incoming, sink: Sink, mark: str) -> Reading[bool]:
    """V3 and R1 write the name after the separator, and JSON in a code block; V3.1 writes the name
    before the separator."""
    name = yield from _read_head(text, mark, DEEPSEEK)
    if name and (yield from text.spaces()) != "{":
        name = (yield from text.word(_LINE)).strip()
        yield from text.skip_spaced("```json")
        yield from text.spaces()
    if not sink.begin_call(name):
        return False
    yield from _read_object(text, sink)
    yield from text.skip_spaced("```")
    yield from _read_tail(text, DEEPSEEK)
    return True


def _kimi_k2(text: Incoming, sink: Sink, mark: str) -> Reading[bool]:
    """The head of a call is its id, `functions.NAME:NUMBER`; models also write it with `_`."""
    head = yield from _read_head(text, mark, KIMI_K2)
    name = head.removeprefix("functions.").removeprefix("functions_")
    if not (
        sink.begin_call(head)
        or sink.begin_call(name)
        or sink.begin_call(_NUMBER.sub("", name), call_id=head)
    ):
        return False
    yield from text.spaces()
    yield from _read_object(text, sink)
    yield from _read_tail(text, KIMI_K2)
    return True


def _read_head(text: Incoming, mark: str, marks: tuple[str, ...]) -> Reading[str]:
    """Read up to the separator; "" if there is none."""
    section, _, call, _, separator = marks
    yield from text.spaces()
    if mark == section:
        if not (yield from text.skip(call)):
            return ""
        yield from text.spaces()
    head = (yield from text.word(_LINE)).strip()
    return head if (yield from text.skip_spaced(separator)) else ""


def _read_tail(text: Incoming, marks: tuple[str, ...]) -> Reading[None]:
    """Read the marks at the end, which models may forget."""
    _, section_end, _, call_end, _ = marks
    for mark in (call_end, section_end):
        yield from text.skip_spaced(mark)


read_deepseek = Marked((DEEPSEEK[0], DEEPSEEK[2]), _deepseek)
read_kimi_k2 = Marked((KIMI_K2[0], KIMI_K2[2]), _kimi_k2)


def _read_object(text: Incoming, sink: Sink) -> Reading[None]:
    """Read the arguments of the open call, if there are any."""
    if (yield from text.next()) != "{" or (yield from text.json_value(sink.arguments)):
        sink.end_call()


def _read_json_calls(text: Incoming, sink: Sink, end: str = "") -> Reading[bool]:
    """Read one call, several, or a list of them; returns whether there was nothing else.

    Args:
        end: the mark after the calls, which models may forget.
    """
    is_call = is_list = False
    while char := (yield from text.spaces()):
        if char == "{":
            if is_call:
                text.record()
            if not (yield from _read_call(text, sink)):
                return False
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


def _read_call(text: Incoming, sink: Sink) -> Reading[bool]:
    """Read a call, whose keys may come in any order; returns whether it was one.

    It begins when its name is known.
    """
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
        if key in ("name", "tool_name") and name is None:
            name = yield from text.json_string()
            if name is None or name not in sink.tools:
                return False
            if early is not None:
                sink.begin_call(name)
                sink.arguments("".join(early))
                has_begun = True
        elif key in ("arguments", "parameters") and early is None and not has_begun:
            if (yield from text.next()) not in ("{", '"', "n"):  # an object, a string or null
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


def _read_arguments(text: Incoming, take: Take) -> Reading[None]:
    char = yield from text.next()
    if char == "{":
        yield from text.json_value(take)
    elif char == '"':
        take((yield from text.json_string()) or "")
    else:
        yield from text.json_value(ignore)

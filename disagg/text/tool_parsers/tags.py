"""Calls as tags, an argument in each: of Qwen3-Coder, GLM, MiniMax-M2, DeepSeek V3.2 and others.

A value may contain tags, also those that end values: one ends the value only if what may come after
it follows. White space between tags is ignored. Values have no types, so they are taken from the
schema of the function. A string is passed on while it arrives, any other value when it is complete.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from disagg.text.answer_delta import Marked, Sink, marks_of
from disagg.text.incoming import Incoming, Reading

MAX_LITERAL_NUM_CHARS = 1 << 16  # longest value that is parsed as a Python literal
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = "\\'\"abfnrtvxuUN\n"
_PYTHON_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
_IS_TEXT = '" string="'  # in a tag of DeepSeek's, before "true" or "false"


class NamedArguments:
    """Writes the arguments of one call.

    Args:
        schema: schema of the function's parameters; None if unknown.
    """

    def __init__(self, sink: Sink, schema: Mapping[str, Any] | None) -> None:
        self._sink = sink
        properties = (schema or {}).get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._is_closed = (schema or {}).get("additionalProperties") is False
        self._is_empty = True
        self._types: frozenset[str] = frozenset()
        self._value: list[str] | None = None  # pieces of a value; None if it is a string

    def begin(self, name: str, *, is_text: bool | None = None) -> None:
        """Begin an argument.

        Args:
            is_text: whether the value is a string; None if the schema decides.
        """
        self._sink.arguments(("{" if self._is_empty else ", ") + _to_json(name) + ": ")
        self._is_empty = False
        self._sink.closing = ""  # an answer that ends inside a value stays as it is
        self._types = types_of(self._properties.get(name))
        if is_text or (is_text is None and self._types == {"string"}):
            self._value = None
            self._sink.arguments('"')
        else:
            self._value = []

    def add(self, piece: str) -> None:
        """Add a piece of the argument's text."""
        if self._value is None:
            self._sink.arguments(_to_json(piece)[1:-1])
        else:
            self._value.append(piece)

    def end(self) -> None:
        if self._value is None:
            self._sink.arguments('"')
        else:
            self._sink.arguments(json_of("".join(self._value), self._types))
        self._sink.closing = "}"

    def may_be(self, name: str) -> bool:
        """Whether the function may have an argument with this name."""
        return name in self._properties or not self._properties

    def may_follow(self, name: str) -> bool:
        """Whether an argument with this name may follow the one that has begun.

        If not, its tag is part of the text. A model may make up an argument, unless the schema
        allows no others.
        """
        return name in self._properties or not self._is_closed or self._value is not None


def types_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema allows; empty if it does not restrict them.

    The schema may be invalid, because without a grammar nothing checks it.
    """
    if not isinstance(schema, Mapping):
        return frozenset()
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    found = {each for each in types if isinstance(each, str)}
    for branch in ("anyOf", "oneOf"):
        options = schema.get(branch)
        for option in options if isinstance(options, list) else ():
            found |= types_of(option)
    values = schema.get("enum")
    if not found and isinstance(values, list):
        found = {_TYPE_NAMES.get(type(value), "") for value in values}
    return frozenset(found)


_TYPE_NAMES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null",
    dict: "object", list: "array",
}  # fmt: skip


def json_of(text: str, types: frozenset[str] = frozenset()) -> str:
    """Convert a value that is JSON or a Python literal to JSON; anything else becomes a string.

    Args:
        types: the allowed types. If a string is allowed, the value is one, unless it is null and
            that is allowed too.
    """
    value = text.strip()
    if "string" in types and not (value.lower() in ("null", "none") and "null" in types):
        return _to_json(text)
    try:
        json.loads(value, parse_constant=_refuse_constant)
        return value
    except (ValueError, RecursionError):
        pass
    if value.lower() in _PYTHON_WORDS:
        return _PYTHON_WORDS[value.lower()]
    return literal_to_json(value) or _to_json(text)


def literal_to_json(source: str) -> str | None:
    """Convert a Python literal to JSON; None if it is not one or has an unpaired surrogate."""
    if len(source) > MAX_LITERAL_NUM_CHARS:
        return None
    try:
        value = ast.literal_eval(_ESCAPE.sub(_kept_escape, source))
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
        return text
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _kept_escape(found: re.Match[str]) -> str:
    """A valid escape, or an escaped backslash, because Python warns of invalid escapes."""
    return found[0] if found[1] in _ESCAPED else "\\" + found[0]


def _to_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


@dataclass(frozen=True)
class Tags:
    """The tags of a format.

    Attributes:
        section, section_end: around one call or several, which models may forget; "" for none.
        name: the characters of names, and of keys without their end.
        name_end: the end of the tag with the name; "" if the name comes before other tags.
        value: before a value; "" if it comes right after its key.
        forgotten: tags that end a value if `value_end` is missing, because models forget it.
        has_lines: whether values are between line breaks.
    """

    section: str
    section_end: str
    call: str
    call_end: str
    name: re.Pattern[str]
    name_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    forgotten: tuple[str, ...] = ()
    has_lines: bool = False

    @property
    def reader(self) -> Marked:
        return Marked(tuple(filter(None, (self.section, self.call))), self.read_call)

    @property
    def marks(self) -> tuple[str, ...]:
        """All tags. Some models have control tokens for them."""
        return tuple(
            tag
            for tag in (
                self.section, self.section_end, self.call, self.call_end, self.name_end,
                self.key, self.key_end, self.value, self.value_end,
            )
            if len(tag) > 1
        )  # fmt: skip

    def read_call(self, text: Incoming, sink: Sink, mark: str) -> Reading[bool]:
        if mark == self.section and not (yield from text.skip_spaced(self.call)):
            return False
        name = yield from self._read_name(text, self.name_end)
        if (yield from text.spaces()) != "<" or not sink.begin_call(name):
            return False
        arguments = NamedArguments(sink, sink.tools[name])
        mark = yield from self._next(text)
        while mark == self.key:
            key = yield from self._read_name(text, self.key_end)
            if self.value:
                yield from text.skip_spaced(self.value)
            key, _, is_text = key.partition(_IS_TEXT)
            arguments.begin(key, is_text=is_text == "true" if is_text else None)
            mark = yield from self._read_value(text, arguments)
            if not mark:
                return True  # the answer ends inside the value
            arguments.end()
            if mark == self.value_end:
                mark = yield from self._next(text)
        if mark or (yield from text.next()):
            sink.end_call()
        if self.section and mark != self.section_end:
            yield from text.skip_spaced(self.section_end)
        return True

    def _read_name(self, text: Incoming, end: str) -> Reading[str]:
        """Read a name, which may be in quotation marks, and the end of its tag."""
        yield from text.spaces()
        name = (yield from text.word(self.name)).strip().strip("\"'")
        return name if not end or (yield from text.skip_spaced(end)) else ""

    def _read_key(self, text: Incoming) -> Reading[str]:
        return (yield from self._read_name(text, self.key_end)).partition(_IS_TEXT)[0]

    def _next(self, text: Incoming) -> Reading[str]:
        """Read the tag that follows an argument; "" if it is none of them."""
        yield from text.spaces()
        ends = filter(None, (self.key, self.call_end, self.section_end))
        return (yield from text.skip_one(ends))

    def _read_value(self, text: Incoming, arguments: NamedArguments) -> Reading[str]:
        """Read a value; returns the tag that ended it, "" if the answer ended before."""
        ends = (self.value_end, *self.forgotten)
        if self.has_lines:
            yield from text.skip("\n")
            ends += tuple("\n" + end for end in ends)
        while mark := (yield from text.until(marks_of(ends), arguments.add)):
            text.record()
            is_end = yield from self._is_end(text, mark.strip(), arguments)
            text.give_back(text.take_record())
            if is_end:
                return mark.strip()
            arguments.add(mark)
        return ""

    def _is_end(self, text: Incoming, mark: str, arguments: NamedArguments) -> Reading[bool]:
        """Whether a tag, which was read, ends a value: what may follow it follows.

        A value may also contain a whole call. After the tags that end the call of the value itself
        comes no tag that ends a value.
        """
        if mark == self.key:
            return arguments.may_be((yield from self._read_key(text)))
        if mark == self.value_end:
            followers = (self.key, self.call_end, self.section_end)
        else:
            followers = (self.section_end, self.section, self.call)
        if not (yield from text.spaces()):
            return True
        follower = yield from text.skip_one(filter(None, followers))
        if follower == self.key:
            return arguments.may_follow((yield from self._read_key(text)))
        if not follower or follower in (self.section, self.call):
            return bool(follower)
        yield from text.spaces()
        if self.section_end and follower != self.section_end:
            yield from text.skip(self.section_end)
            yield from text.spaces()
        return not (yield from text.skip(self.value_end))


_ATTRIBUTE = re.compile(r"[^>\n]")
# <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
QWEN3_CODER = Tags(
    "<tool_call>", "</tool_call>", "<function=", "</function>", _ATTRIBUTE, ">",
    "<parameter=", ">", "", "</parameter>",
    forgotten=("<parameter=", "</function>", "</tool_call>"), has_lines=True,
)  # fmt: skip
# <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
GLM45 = Tags(
    "", "", "<tool_call>", "</tool_call>", re.compile(r"[^<\s]"), "",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
# <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>
# </minimax:tool_call>
MINIMAX_M2 = Tags(
    "<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=", "</invoke>", _ATTRIBUTE, ">",
    "<parameter name=", ">", "", "</parameter>", forgotten=("</invoke>", "</minimax:tool_call>"),
)  # fmt: skip
# <function name="NAME"><param name="KEY">VALUE</param></function>
MINICPM5 = Tags(
    "", "", "<function name=", "</function>", _ATTRIBUTE, ">", "<param name=", ">", "", "</param>",
    forgotten=("</function>",),
)  # fmt: skip
# GLM's, with ":opensource" in each tag, a section, and <tool_sep:opensource> after the name
HY_V3 = Tags(
    "<tool_calls:opensource>", "</tool_calls:opensource>", "<tool_call:opensource>",
    "</tool_call:opensource>", re.compile(r"[^<\s]"), "<tool_sep:opensource>",
    "<arg_key:opensource>", "</arg_key:opensource>", "<arg_value:opensource>",
    "</arg_value:opensource>",
)  # fmt: skip
# MiniMax-M2's, with "｜DSML｜" in each tag; DeepSeek V3.2 and V4 differ in the tag of the section.
_DSML = {
    f"<｜DSML｜{section}>": Tags(
        f"<｜DSML｜{section}>", f"</｜DSML｜{section}>", "<｜DSML｜invoke name=",
        "</｜DSML｜invoke>", _ATTRIBUTE, ">", "<｜DSML｜parameter name=", ">", "",
        "</｜DSML｜parameter>", forgotten=("</｜DSML｜invoke>", f"</｜DSML｜{section}>"),
    )
    for section in ("tool_calls", "function_calls")
}  # fmt: skip


def _dsml(text: Incoming, sink: Sink, mark: str) -> Reading[bool]:
    tags = _DSML.get(mark) or next(iter(_DSML.values()))
    return (yield from tags.read_call(text, sink, mark))


read_deepseek_v32 = Marked((*_DSML, "<｜DSML｜invoke name="), _dsml)

"""Calls as tags, an argument in each: of Qwen3-Coder, GLM, MiniMax-M2.

A value may contain tags, also those that end values: one ends the value only if what may come after
it follows. White space between tags is ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from disagg.text.answer_delta import Sink
from disagg.text.incoming import Incoming, Reading
from disagg.text.tool_parsers.format import Marked, marks_of
from disagg.text.tool_parsers.named_arguments import NamedArguments


@dataclass(frozen=True)
class _Tags:
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
    def begins(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.section, self.call)))

    def read_call(self, text: Incoming, sink: Sink, mark: str) -> Reading[bool]:
        if mark == self.section:
            yield from text.spaces()
            if not (yield from text.skip(self.call)):
                return False
        name = yield from self._read_name(text, self.name_end)
        if (yield from text.spaces()) != "<" or not sink.begin_call(name):
            return False
        arguments = NamedArguments(sink, sink.tools[name])
        mark = yield from self._next(text)
        while mark == self.key:
            key = yield from self._read_name(text, self.key_end)
            if self.value:
                yield from text.spaces()
                yield from text.skip(self.value)
            arguments.begin(key)
            mark = yield from self._read_value(text, arguments)
            if not mark:
                return True  # the answer ends inside the value
            arguments.end()
            if mark == self.value_end:
                mark = yield from self._next(text)
        if mark or (yield from text.next()):
            sink.end_call()
        if self.section and mark != self.section_end:
            yield from text.spaces()
            yield from text.skip(self.section_end)
        return True

    def _read_name(self, text: Incoming, end: str) -> Reading[str]:
        """Read a name, which may be in quotation marks, and the end of its tag."""
        yield from text.spaces()
        name = (yield from text.word(self.name)).strip().strip("\"'")
        return name if not end or (yield from text.skip(end)) else ""

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
            text.give_back(text.recorded())
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
            return arguments.may_be((yield from self._read_name(text, self.key_end)))
        if mark == self.value_end:
            followers = (self.key, self.call_end, self.section_end)
        else:
            followers = (self.section_end, self.section, self.call)
        if not (yield from text.spaces()):
            return True
        follower = yield from text.skip_one(filter(None, followers))
        if follower == self.key:
            return arguments.may_follow((yield from self._read_name(text, self.key_end)))
        if not follower or follower in (self.section, self.call):
            return bool(follower)
        yield from text.spaces()
        if self.section_end and follower != self.section_end:
            yield from text.skip(self.section_end)
            yield from text.spaces()
        return not (yield from text.skip(self.value_end))


_ATTRIBUTE = re.compile(r"[^>\n]")
# <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
_QWEN3_CODER = _Tags(
    "<tool_call>", "</tool_call>", "<function=", "</function>", _ATTRIBUTE, ">",
    "<parameter=", ">", "", "</parameter>",
    forgotten=("<parameter=", "</function>", "</tool_call>"), has_lines=True,
)  # fmt: skip
# <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
_GLM45 = _Tags(
    "", "", "<tool_call>", "</tool_call>", re.compile(r"[^<\s]"), "",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
# <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>
# </minimax:tool_call>
_MINIMAX_M2 = _Tags(
    "<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=", "</invoke>", _ATTRIBUTE, ">",
    "<parameter name=", ">", "", "</parameter>", forgotten=("</invoke>", "</minimax:tool_call>"),
)  # fmt: skip
read_qwen3_coder = Marked(_QWEN3_CODER.begins, _QWEN3_CODER.read_call)
read_glm45 = Marked(_GLM45.begins, _GLM45.read_call)
read_minimax_m2 = Marked(_MINIMAX_M2.begins, _MINIMAX_M2.read_call)

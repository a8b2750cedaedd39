"""The parsed parts of an answer as they arrive: reasoning, text and tool calls.

A reader reads an answer after its reasoning, and puts text and calls into a sink. A call is put
there while it is generated. What turns out not to be a call of an offered function stays text.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from disagg.text.incoming import Incoming, Marks, Reading, Take

CallIdStyle: TypeAlias = Literal["openai", "mistral"]
# Name of an offered function -> JSON schema of its parameters.
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]


class CallDelta(msgspec.Struct, frozen=True, gc=False):
    """New text of one tool call.

    number: the call's position in its answer, from 0.
    arguments: the next piece of the call's JSON.
    id, name: in the first delta of a call, else "".
    """

    number: int
    arguments: str = ""
    id: str = ""
    name: str = ""


class AnswerDelta(msgspec.Struct, frozen=True, gc=False):
    """New parts of an answer.

    It is a struct because one is made for each token; a named tuple would take four times as long.
    """

    reasoning: str
    text: str
    calls: list[CallDelta]


def join_calls(deltas: Iterable[CallDelta]) -> list[CallDelta]:
    """Join deltas, which are in order, to whole calls."""
    groups = groupby(deltas, key=lambda delta: delta.number)
    whole = []
    for _, group in groups:
        first, *others = group
        arguments = "".join((first.arguments, *(each.arguments for each in others)))
        whole.append(replace(first, arguments=arguments))
    return whole


class Sink:
    """Collects the parts that readers find. A call ends at the latest when another part begins.

    Args:
        answer_id: seeds the ids of calls, which must differ within a conversation.
        tools: the offered functions.
        call_id_style: the kind of ids that the model's template accepts in later turns.
        parallel: whether an answer may have several calls; otherwise only the first one counts.
        is_reasoning: whether the answer begins with reasoning.

    Attributes:
        closing: what ends the JSON of the open call if nothing else follows.
        is_calling: whether the last call is incomplete.
    """

    def __init__(
        self,
        answer_id: str,
        tools: Tools,
        *,
        call_id_style: CallIdStyle = "openai",
        parallel: bool = True,
        is_reasoning: bool = False,
    ) -> None:
        self.tools = tools
        self.is_reasoning = is_reasoning
        self.closing = ""
        self.is_calling = False
        self.num_calls = 0  # calls that have begun
        self.is_full = False  # whether the only allowed call is complete
        self._answer_id = answer_id
        self._call_id_style = call_id_style
        self._parallel = parallel
        self._has_arguments = False
        self._reasoning = ""
        self._text = ""
        self._calls: list[CallDelta] = []

    def reasoning(self, text: str) -> None:
        if text and self.is_calling:
            self.end_call()
        if not self.is_full:
            self._reasoning += text

    def text(self, text: str) -> None:
        if text and self.is_calling:
            self.end_call()
        if not self.is_full:
            self._text += text

    def begin_call(self, name: str, call_id: str = "") -> bool:
        """Begin a call, which ends the reasoning.

        Args:
            call_id: the id that the model gives to the call, if it does.

        Returns:
            False if no such function was offered: then it is no call, and its text stays text.
        """
        if name not in self.tools:
            return False
        self.end_call()
        self.is_reasoning = False
        if not self.is_full:
            self.is_calling = True
            number, self._has_arguments = self.num_calls, False
            self.num_calls += 1
            self._calls.append(CallDelta(number, "", call_id or self._new_id(number), name))
        return True

    def arguments(self, text: str) -> None:
        """Add JSON to the arguments of the call that has begun."""
        if self.is_full or not text:
            return
        self._has_arguments = True
        self._calls.append(CallDelta(self.num_calls - 1, text))

    def end_call(self) -> None:
        """End the open call, if there is one; the mark at its end may be missing."""
        if not self.is_calling:
            return
        self.is_calling = False
        self.arguments(self.closing if self._has_arguments else "{}")
        self.closing = ""
        self.is_full = not self._parallel

    def take(self) -> AnswerDelta:
        """Return the parts since the last call."""
        calls = join_calls(self._calls) if len(self._calls) > 1 else self._calls
        delta = AnswerDelta(self._reasoning, self._text, calls)
        self._reasoning = self._text = ""
        self._calls = []
        return delta

    def _new_id(self, number: int) -> str:
        digest = blake2b(f"{self._answer_id}/{number}".encode(), digest_size=12)
        if self._call_id_style == "openai":
            return f"call_{digest.hexdigest()}"
        value, chars = int.from_bytes(digest.digest(), "little"), string.ascii_letters
        return "".join(chars[value // len(chars) ** digit % len(chars)] for digit in range(9))


class Trimmed:
    """Passes text on, but holds white space back until text follows, to drop it before a mark."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._spaces: list[str] = []

    def __call__(self, text: str) -> None:
        shown = text.rstrip()
        if shown == text and not self._spaces:
            self._take(text)
            return
        if shown:
            self._take("".join((*self._spaces, shown)))
            self._spaces.clear()
        if len(shown) < len(text):
            self._spaces.append(text[len(shown) :])

    def drop(self) -> None:
        self._spaces.clear()

    def flush(self) -> None:
        if self._spaces:
            self._take("".join(self._spaces))
            self.drop()


Reader: TypeAlias = Callable[[Incoming, Sink], Reading[None]]
marks_of = functools.cache(lambda marks: Marks(*marks))


@dataclass(frozen=True)
class Marked:
    """Reads calls that begin with a mark, anywhere in an answer.

    Attributes:
        begins: the marks.
        read_call: reads what follows the given mark; returns whether that was calls. If it was not,
            or not to its end, what was recorded meanwhile is text.
    """

    begins: tuple[str, ...]
    read_call: Callable[[Incoming, Sink, str], Reading[bool]]

    def __call__(self, text: Incoming, sink: Sink, dropped: tuple[str, ...] = ()) -> Reading[None]:
        """Read the rest of an answer. `dropped` are marks that are not part of its text."""
        trimmed = Trimmed(sink.text)
        while (yield from self.until_call(text, sink, trimmed, dropped)):
            pass
        if sink.num_calls:
            trimmed.drop()
        trimmed.flush()

    def until_call(
        self, text: Incoming, sink: Sink, take: Trimmed, ends: tuple[str, ...]
    ) -> Reading[str]:
        """Pass text to `take` up to a call, which is read, or up to one of `ends`.

        Returns the mark that was found; "" at the end of the answer.
        """
        while mark := (yield from text.until(marks_of(self.begins + ends), take)):
            if mark in ends:
                return mark
            num_calls = sink.num_calls
            text.record(mark)
            is_whole = yield from self.read_call(text, sink, mark)
            rest = "" if is_whole else text.take_record()
            if sink.num_calls > num_calls:
                take.drop()
                sink.text(rest)
                return mark
            take(rest)
        return ""


def read_text(text: Incoming, sink: Sink, before: str = "") -> Reading[None]:
    """Read the rest as text. White space after calls is dropped.

    Args:
        before: text that was read already.
    """
    take = Trimmed(sink.text) if sink.num_calls else sink.text
    take(before)
    yield from text.until(marks_of(()), take)

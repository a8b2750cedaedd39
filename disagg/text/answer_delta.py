"""The parsed parts of an answer as they arrive: reasoning, text and tool calls."""

from __future__ import annotations

import string
from collections.abc import Iterable
from hashlib import blake2b
from itertools import groupby
from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from disagg.text.incoming import Take

CallIdStyle: TypeAlias = Literal["openai", "mistral"]


class CallDelta(msgspec.Struct, frozen=True, gc=False):
    """More of one call, the how many-th of its answer, from 0.

    arguments: the next of the call's JSON.
    id, name: in the first delta of a call, else "".
    """

    number: int
    arguments: str = ""
    id: str = ""
    name: str = ""


class AnswerDelta(msgspec.Struct, frozen=True, gc=False):
    """Made for each token, so a struct: it takes a quarter of a named tuple's time."""

    reasoning: str
    text: str
    calls: list[CallDelta]


def joined(deltas: Iterable[CallDelta]) -> list[CallDelta]:
    """Whole calls of their deltas, which are in order."""
    groups = groupby(deltas, key=lambda delta: delta.number)
    whole = []
    for _, group in groups:
        first, *others = group
        arguments = "".join((first.arguments, *(each.arguments for each in others)))
        whole.append(replace(first, arguments=arguments))
    return whole


class Sink:
    """Where readers put what they find. A call ends at the latest where something else begins.

    Args:
        answer_id: makes the calls' ids, which must differ within a conversation.
        call_id_style: which ids the model's template accepts in later turns.
        parallel: whether an answer may have several calls; otherwise nothing is taken after one.
        is_reasoning: how the answer begins.
    """

    def __init__(
        self,
        answer_id: str,
        *,
        call_id_style: CallIdStyle = "openai",
        parallel: bool = True,
        is_reasoning: bool = False,
    ) -> None:
        self.is_reasoning = is_reasoning
        self.num_calls = 0  # begun
        self.is_full = False  # the only call that is wanted is complete
        self._answer_id = answer_id
        self._call_id_style = call_id_style
        self._parallel = parallel
        self._is_open = False  # the last call: it is not complete
        self._has_arguments = False
        self._reasoning = ""
        self._text = ""
        self._calls: list[CallDelta] = []
        self._arguments: list[str] = []  # more of the last call's

    def reasoning(self, text: str) -> None:
        if text and self._is_open:
            self.end_call()
        if not self.is_full:
            self._reasoning += text

    def text(self, text: str) -> None:
        if text and self._is_open:
            self.end_call()
        if not self.is_full:
            self._text += text

    def begin_call(self, name: str, call_id: str = "") -> None:
        """
        Args:
            call_id: by which the model itself names the call, if it does.
        """
        self.end_call()
        if not self.is_full:
            if self._arguments:
                self._give_arguments()
            self._is_open = True
            number, self._has_arguments = self.num_calls, False
            self.num_calls += 1
            self._calls.append(CallDelta(number, "", call_id or self._new_id(number), name))

    def arguments(self, text: str) -> None:
        """More JSON of the call that has begun."""
        if self.is_full or not text:
            return
        self._has_arguments = True
        self._arguments.append(text)

    def _give_arguments(self) -> None:
        pieces, self._arguments = self._arguments, []
        text = pieces[0] if len(pieces) == 1 else "".join(pieces)
        if self._calls:
            self._calls[-1] = replace(self._calls[-1], arguments=text)
        else:
            self._calls.append(CallDelta(self.num_calls - 1, text))

    def end_call(self) -> None:
        """The call that has begun is complete; nothing where none is open."""
        if not self._is_open:
            return
        self._is_open = False
        if not self._has_arguments:
            self.arguments("{}")
        self.is_full = not self._parallel

    def end(self) -> None:
        """The answer is complete, so the last call is, though its end mark may not have been seen:
        a model can end its answer with it."""
        self.end_call()

    def take(self) -> AnswerDelta:
        """What was put here since the last call."""
        if self._arguments:
            self._give_arguments()
        delta = AnswerDelta(self._reasoning, self._text, self._calls)
        self._reasoning = self._text = ""
        self._calls = []
        return delta

    def _new_id(self, number: int) -> str:
        digest = blake2b(f"{self._answer_id}/{number}".encode(), digest_size=12)
        if self._call_id_style == "openai":
            return f"call_{digest.hexdigest()}"
        value, chars = int.from_bytes(digest.digest(), "little"), string.ascii_letters
        return "".join(chars[value // len(chars) ** place % len(chars)] for place in range(9))


class Trimmed:
    """Hands text on, but white space only with text behind it: before a mark it says nothing."""

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

"""Splits a streamed answer into reasoning, text and tool calls, in the format of its model."""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.text.answer_delta import (
    AnswerDelta,
    CallIdStyle,
    Marked,
    Reader,
    Sink,
    Tools,
    read_text,
)
from disagg.text.incoming import Incoming, Reading
from disagg.text.reasoning import ReasoningFormat, read_reasoning
from disagg.text.tool_parsers.harmony import read_harmony
from disagg.text.tool_parsers.registry import HARMONY, ToolFormat


@dataclass(frozen=True)
class AnswerSyntax:
    """How the answers to a request are parsed.

    Attributes:
        reasoning: format of the reasoning; None if the model has none.
        read_calls: parses the answer after the reasoning; None if it is text.
        tools: the offered functions.
        parallel: whether an answer may have several calls; otherwise it ends with the first.
        marks: texts that are needed to parse an answer and may be control tokens.
    """

    reasoning: ReasoningFormat | None = None
    read_calls: Reader | None = None
    tools: Tools = field(default_factory=dict)
    call_id_style: CallIdStyle = "openai"
    parallel: bool = True
    marks: tuple[str, ...] = ()

    @classmethod
    def from_formats(
        cls,
        reasoning: ReasoningFormat | None,
        calls: ToolFormat | None,
        tools: Tools,
        *,
        read_calls: Reader | None = None,
        parallel: bool = True,
    ) -> AnswerSyntax:
        """The syntax of a model that writes reasoning and calls in these formats.

        Args:
            read_calls: parses calls if they are not in the format `calls`, for example because a
                grammar restricts the answer.
        """
        marks = (*(reasoning.marks if reasoning else ()), *(calls.marks if calls else ()))
        if read_calls is None and calls is not None and tools:
            read_calls = calls.read
        if reasoning is not None and reasoning.is_harmony and read_calls is HARMONY.read:
            read_calls = None  # in harmony, calls are not in messages to the user
        style = calls.call_id_style if calls else "openai"
        return cls(reasoning, read_calls, tools, style, parallel, marks)


class AnswerReader:
    """Parses one streamed answer.

    Args:
        answer_id: seeds the ids of calls, which must differ within a conversation.
        prompt_tail: the last characters of the prompt.

    Attributes:
        is_reasoning: whether the text so far ends inside the reasoning.
        is_calling: whether it ends inside a call.
        is_done: whether the only allowed call is complete.
    """

    def __init__(self, syntax: AnswerSyntax, answer_id: str, prompt_tail: str = "") -> None:
        is_open = syntax.reasoning is not None and syntax.reasoning.is_open(prompt_tail)
        self._text = Incoming()
        self._sink = Sink(
            answer_id,
            syntax.tools,
            call_id_style=syntax.call_id_style,
            parallel=syntax.parallel,
            is_reasoning=is_open,
        )
        self._reading = _read(self._text, self._sink, syntax, is_open)
        self.is_reasoning = is_open
        self.is_calling = self.is_done = False

    def push(self, text: str, *, is_end: bool = False, is_cut: bool = False) -> AnswerDelta:
        """Add the next piece of the answer; returns the new parts.

        Args:
            is_end: whether nothing follows.
            is_cut: whether the answer was cut off instead of ended by the model.
        """
        sink = self._sink
        if is_end or not self._text.passes(text):
            self._text.push(text, is_end=is_end)
            next(self._reading, None)
        if is_end and not is_cut:
            sink.end_call()
        self.is_reasoning, self.is_done = sink.is_reasoning, sink.is_full
        self.is_calling = sink.is_calling
        return sink.take()


def read_arguments_of(function: str) -> Reader:
    """A reader for answers that consist of the arguments of one function."""

    def read(text: Incoming, sink: Sink) -> Reading[None]:
        text.record()
        is_call = (yield from text.spaces()) == "{" and sink.begin_call(function)
        before = text.recorded()
        if is_call and (yield from text.json_value(sink.arguments)):
            sink.end_call()
        yield from read_text(text, sink, "" if is_call else before)

    return read


def _read(text: Incoming, sink: Sink, syntax: AnswerSyntax, is_open: bool) -> Reading[None]:
    reasoning, read_calls = syntax.reasoning, syntax.read_calls
    if reasoning is not None and reasoning.is_harmony:
        yield from read_harmony(text, sink, read_calls)
        return
    dropped: tuple[str, ...] = ()
    if reasoning is not None and (
        yield from read_reasoning(text, sink, reasoning, read_calls, is_open=is_open)
    ):
        dropped = reasoning.ends
    if isinstance(read_calls, Marked):
        yield from read_calls(text, sink, dropped)
    elif read_calls is not None:
        yield from read_calls(text, sink)
    else:
        yield from read_text(text, sink)

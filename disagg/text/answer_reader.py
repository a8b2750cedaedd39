"""Splits a streamed answer into reasoning, text and tool calls, in the format of its model.

Reasoning is the text before the answer, between two marks. A chat template may write the first
mark, so that the output begins inside the reasoning, or both marks, so that the model does not
reason.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from disagg.text.answer_delta import (
    AnswerDelta,
    Marked,
    Reader,
    Sink,
    Tools,
    Trimmed,
    marks_of,
    read_text,
)
from disagg.text.incoming import Incoming, Reading
from disagg.text.tokenizer import Tokenizer
from disagg.text.tool_parsers.harmony import FINAL, FORCE_FINAL, read_harmony
from disagg.text.tool_parsers.harmony import MARKS as HARMONY_MARKS
from disagg.text.tool_parsers.registry import HARMONY as HARMONY_CALLS
from disagg.text.tool_parsers.registry import ToolFormat, choose_format

TAIL_NUM_TOKENS = 16


@dataclass(frozen=True)
class ReasoningFormat:
    """A format in which models write reasoning.

    Attributes:
        names: its names for `--reasoning-parser`, which are vLLM's.
        starts, ends: the marks; models may write any of several.
        shown_by: a chat template with any of these texts uses this format.
        is_always_open: whether an answer begins inside the reasoning although the prompt does not
            end with a mark.
        forced_end: text that ends reasoning over its budget; "" for the first of `ends`.
        marks: texts that may be control tokens.
    """

    names: tuple[str, ...]
    starts: tuple[str, ...]
    ends: tuple[str, ...]
    shown_by: tuple[str, ...] = ()
    is_always_open: bool = False
    forced_end: str = ""
    is_harmony: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return HARMONY_MARKS if self.is_harmony else (*self.starts, *self.ends)

    def is_open(self, prompt_tail: str) -> bool:
        """Whether an answer begins inside the reasoning.

        Args:
            prompt_tail: the last characters of the prompt.
        """
        has_begun = prompt_tail.rstrip().endswith(self.starts)
        return has_begun or (self.is_always_open and not self.is_closed(prompt_tail))

    def is_closed(self, prompt_tail: str) -> bool:
        """Whether the prompt has ended the reasoning, which turns it off."""
        return prompt_tail.rstrip().endswith(self.ends)


def prompt_tail(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The end of a prompt's text, long enough to show whether it has begun the reasoning."""
    return tokenizer.decode(token_ids[-TAIL_NUM_TOKENS:], skip_special_tokens=False)


HARMONY = ReasoningFormat(
    ("openai_gptoss",), (), (FINAL,), ("<|channel|>",), forced_end=FORCE_FINAL,
    is_always_open=True, is_harmony=True,
)  # fmt: skip
_THINK = (("<think>",), ("</think>",))
FORMATS = (
    HARMONY,
    ReasoningFormat(("mistral",), ("[THINK]",), ("[/THINK]",), ("[THINK]",)),
    ReasoningFormat(("seed_oss",), ("<seed:think>",), ("</seed:think>",), ("<seed:think>",)),
    ReasoningFormat(("gemma4",), ("<|channel>thought",), ("<channel|>",), ("<|channel>thought",)),
    ReasoningFormat(
        ("cohere_command3", "cohere_command4"), ("<|START_THINKING|>",), ("<|END_THINKING|>",),
        ("<|START_THINKING|>",),
    ),
    ReasoningFormat(
        ("granite",),
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        ("Here is my thought process", "Here's my thought process"),
    ),
    ReasoningFormat(
        ("qwen3", "glm45", "deepseek_v3", "deepseek_v31", "kimi_k2", "ernie45", "holo2"),
        *_THINK, ("<think>", "</think>"),
    ),
    ReasoningFormat(("deepseek_r1", "minimax_m2", "nemotron_v3", "step3"), *_THINK,
                    is_always_open=True),
)  # fmt: skip
NAMES = ("none", *(name for each in FORMATS for name in each.names))


@functools.lru_cache(maxsize=64)
def reasoning_format_of(template_source: str, name: str = "") -> ReasoningFormat | None:
    """The format of a model's reasoning; None if it has none or the format is unknown.

    Args:
        name: name of a parser; "" detects it from the chat template.
    """
    return choose_format(FORMATS, template_source, name)


def read_reasoning(
    text: Incoming,
    sink: Sink,
    reasoning: ReasoningFormat,
    read_calls: Reader | None,
    *,
    is_open: bool,
) -> Reading[bool]:
    """Read up to the end of the reasoning, which a call ends too: models forget the mark before it.

    Args:
        is_open: whether the answer begins inside the reasoning.

    Returns:
        Whether a call has ended it.
    """
    text.record()
    yield from text.spaces()
    has_mark = bool((yield from text.skip_one(reasoning.starts)))
    before = text.take_record()
    if not (is_open or has_mark):
        text.give_back(before)
        return False
    sink.is_reasoning = True
    yield from text.spaces()
    trimmed = Trimmed(sink.reasoning)
    if isinstance(read_calls, Marked):
        mark = yield from read_calls.until_call(text, sink, trimmed, reasoning.ends)
    else:
        mark = yield from text.until(marks_of(reasoning.ends), trimmed)
    if not mark:
        trimmed.flush()
    elif mark in reasoning.ends:
        sink.is_reasoning = False
        yield from text.word(_LINE_BREAK)
    return bool(mark) and mark not in reasoning.ends


_LINE_BREAK = re.compile(r"\n")


@dataclass(frozen=True)
class AnswerSyntax:
    """How the answers to a request are parsed.

    Attributes:
        reasoning: format of the reasoning; None if the model has none.
        calls: format in which the model writes calls; None if it is unknown.
        tools: the offered functions.
        reader: parses calls in place of `calls`, because a grammar restricts the answer.
        parallel: whether an answer may have several calls; otherwise it ends with the first.
    """

    reasoning: ReasoningFormat | None = None
    calls: ToolFormat | None = None
    tools: Tools = field(default_factory=dict)
    reader: Reader | None = None
    parallel: bool = True

    @property
    def read_calls(self) -> Reader | None:
        """Parses the answer after the reasoning; None if it is text."""
        if self.reader is not None or self.calls is None or not self.tools:
            return self.reader
        if self.calls is HARMONY_CALLS and self.reasoning is not None and self.reasoning.is_harmony:
            return None  # in harmony, calls are not in messages to the user
        return self.calls.read

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that are needed to parse an answer and may be control tokens."""
        return tuple(mark for each in (self.reasoning, self.calls) if each for mark in each.marks)


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
            call_id_style=syntax.calls.call_id_style if syntax.calls else "openai",
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
        before = text.take_record()
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

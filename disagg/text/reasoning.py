"""Reasoning: the text before the answer, between two marks of the model's format.

A chat template may write the first mark, so that the output begins inside the reasoning, or both
marks, so that the model does not reason.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from disagg.text.answer_delta import Marked, Reader, Sink, Trimmed, marks_of
from disagg.text.incoming import Incoming, Reading
from disagg.text.tool_parsers.harmony import FINAL, FORCE_FINAL
from disagg.text.tool_parsers.harmony import MARKS as HARMONY_MARKS
from disagg.text.tool_parsers.registry import choose_format

if TYPE_CHECKING:
    from disagg.text.tokenizer import Tokenizer

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
    before = text.recorded()
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

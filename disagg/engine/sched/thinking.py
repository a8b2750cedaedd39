"""The state of an answer's reasoning: when it must end, and where a grammar begins.

The state is a function of the answer's tokens, so a sequence that moves or is recomputed continues
unchanged. Knows tokens, not text; must not know logits or devices.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from disagg.messages import Thinking


class Allowed(NamedTuple):
    """The tokens that may come next.

    only: the only token that is allowed. None: the other fields apply.
    grammar_at: only tokens of the grammar are allowed, whose text begins at this token of the
        sequence. None: any token is allowed.
    also: tokens that are allowed in addition to the grammar's tokens.
    is_end: whether the answer may end here.
    """

    only: int | None = None
    grammar_at: int | None = None
    also: tuple[int, ...] = ()
    is_end: bool = True


class ThinkingState:
    """The reasoning state of one answer.

    Args:
        num_prompt_tokens: the answer begins after so many tokens of the sequence.
    """

    __slots__ = ("_answer_at", "_num_looked_at", "_opened_at", "_over_at", "thinking")

    def __init__(self, thinking: Thinking, num_prompt_tokens: int) -> None:
        self.thinking = thinking
        self._answer_at = self._num_looked_at = num_prompt_tokens
        self._opened_at = num_prompt_tokens if thinking.is_open else None
        self._over_at: int | None = None  # the first token after the reasoning

    def is_over(self, tokens: SequenceOf[int]) -> bool:
        """Whether the reasoning has ended.

        Args:
            tokens: the prompt and the answer so far; the tokens of the last call are a prefix.
        """
        if self._over_at is None and len(tokens) > self._num_looked_at:
            self._find_marks(tokens)
            self._num_looked_at = len(tokens)
        return self._over_at is not None

    def allowed(self, tokens: SequenceOf[int], *, has_grammar: bool) -> Allowed:
        """The tokens that may come next. Args: see `is_over`."""
        is_over, num_tokens = self.is_over(tokens), len(tokens)
        thinking, opened_at = self.thinking, self._opened_at
        if not is_over and opened_at is not None and thinking.budget is not None:
            place = num_tokens - opened_at - thinking.budget
            if 0 <= place < len(thinking.forced_end):
                return Allowed(thinking.forced_end[place])
        if not has_grammar:
            return Allowed()
        if self._over_at is not None and self._over_at > self._answer_at:
            place = num_tokens - self._over_at
            if place < len(thinking.then):
                return Allowed(thinking.then[place])
            return Allowed(grammar_at=self._over_at + len(thinking.then))
        if is_over or (opened_at is None and not thinking.is_framed):
            # The model answers without reasoning, or it may begin to reason now.
            starts = (start[0] for start in thinking.starts if len(start) == 1)
            is_first = num_tokens == self._answer_at
            return Allowed(grammar_at=self._answer_at, also=tuple(starts) if is_first else ())
        return Allowed(is_end=thinking.is_framed)  # the answer may end with a tool call here

    def _find_marks(self, tokens: SequenceOf[int]) -> None:
        thinking = self.thinking
        if self._opened_at is None:
            longest = max(map(len, thinking.starts), default=0)
            answer = tuple(tokens[self._answer_at : self._answer_at + longest])
            for start in thinking.starts:
                if answer[: len(start)] == start:
                    self._opened_at = self._answer_at + len(start)
            if self._opened_at is None and not thinking.is_framed:
                if not any(start[: len(answer)] == answer for start in thinking.starts):
                    self._over_at = self._answer_at
                return
        end, size = thinking.end, len(thinking.end)
        first = self._answer_at + size if thinking.is_framed else (self._opened_at or 0) + size
        for stop in range(max(first, self._num_looked_at + 1), len(tokens) + 1):
            if tokens[stop - 1] == end[-1] and tuple(tokens[stop - size : stop]) == end:
                self._over_at = stop
                return

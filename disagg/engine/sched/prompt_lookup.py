"""Prompt-lookup drafts: propose the tokens that followed the last n-gram when it occurred before.

Such drafts suit answers that repeat their prompt or themselves (quotations, edits, code, lists).
They cost a dict look-up and need no draft model (prompt lookup decoding, Saxena 2023; vLLM's method
"ngram"). This module only proposes drafts: `drafting` decides when, `speculation` verifies them.
Knows no device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from weakref import WeakKeyDictionary

from disagg.engine.sched.sequence import Sequence

MAX_INDEXED = 16_384  # only so many last tokens of a prompt are indexed; each takes 200 bytes


class Ngrams:
    """The last position at which each n-gram of `length` tokens ended in a growing sequence."""

    __slots__ = ("_length", "_next_end", "_places")

    def __init__(self, length: int, num_tokens: int) -> None:
        self._length = length
        self._next_end = max(length, num_tokens - MAX_INDEXED)
        self._places: dict[tuple[int, ...], int] = {}

    def take_in(self, tokens: list[int]) -> int | None:
        """Index the new tokens.

        Returns the position at which the last n-gram ended when it occurred before; None if it did
        not occur before.
        """
        length, places, before = self._length, self._places, None
        for end in range(self._next_end, len(tokens) + 1):
            run = tuple(tokens[end - length : end])
            before = places.get(run)
            places[run] = end
        self._next_end = max(self._next_end, len(tokens) + 1)
        return before


class PromptLookup:
    """A `drafting.Proposer` that looks in the sequence itself.

    Args:
        num_tokens: largest number of tokens in a draft.
        match_length: length of the n-gram that must have occurred before.
    """

    knows_ahead = True
    spent_s = 0.0  # next to nothing

    def __init__(self, num_tokens: int, match_length: int) -> None:
        self.num_tokens = num_tokens
        self._match_length = match_length
        self._ngrams = WeakKeyDictionary[Sequence, Ngrams]()

    def token_s(self, num_sequences: int, place: int) -> float:
        return 0.0

    def entry_s(self, sequence: Sequence) -> float:
        return 0.0

    def propose(self, limits: Mapping[Sequence, int]) -> Iterator[tuple[Sequence, tuple[int, ...]]]:
        return ((sequence, self.draft(sequence)[:limit]) for sequence, limit in limits.items())

    def draft(self, sequence: Sequence) -> tuple[int, ...]:
        tokens = sequence.tokens
        ngrams = self._ngrams.get(sequence)
        if ngrams is None:
            self._ngrams[sequence] = ngrams = Ngrams(self._match_length, len(tokens))
        place = ngrams.take_in(tokens)
        if place is None:
            return ()
        period = len(tokens) - place  # if this is shorter than the draft, the draft repeats it
        return tuple(tokens[place + i % period] for i in range(self.num_tokens))

"""Finds where the last n-gram of a sequence occurred before, for drafts (`prompt_lookup.py`)."""

from __future__ import annotations

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

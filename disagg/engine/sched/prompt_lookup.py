"""Prompt-lookup drafts: propose the tokens that followed the last n-gram when it occurred before.

Such drafts suit answers that repeat their prompt or themselves (quotations, edits, code, lists).
They cost a dict look-up and need no draft model (prompt lookup decoding, Saxena 2023; vLLM's method
"ngram"). This module only proposes drafts; `speculation` verifies them. Knows no device.
"""

from __future__ import annotations

from collections.abc import Iterable

from disagg.engine.sched.ngrams import Ngrams
from disagg.engine.sched.sequence import Sequence


class PromptLookup:
    """Proposes a draft for each decoding sequence that has none.

    Args:
        num_tokens: largest number of tokens in a draft.
        match_length: length of the n-gram that must have occurred before.
    """

    def __init__(self, num_tokens: int, match_length: int) -> None:
        self._num_tokens = num_tokens
        self._match_length = match_length

    def propose(self, running: Iterable[Sequence]) -> bool:
        """Propose drafts. Returns whether some sequence got one."""
        has_drafts = False
        for sequence in running:
            is_decoding = len(sequence.tokens) - sequence.num_computed == 1
            # A sequence that is handed over leaves with its next token, so a draft is useless.
            is_served = not sequence.hand_over and sequence.takes_drafts
            if is_decoding and is_served and not sequence.draft:
                sequence.draft = self._draft(sequence)
                has_drafts = has_drafts or bool(sequence.draft)
        return has_drafts

    def _draft(self, sequence: Sequence) -> tuple[int, ...]:
        tokens = sequence.tokens
        if sequence.ngrams is None:
            sequence.ngrams = Ngrams(self._match_length, len(tokens))
        place = sequence.ngrams.take_in(tokens)
        if place is None:
            return ()
        num_tokens = min(self._num_tokens, sequence.max_num_tokens - 1 - len(tokens))
        period = len(tokens) - place  # if this is shorter than the draft, the draft repeats it
        return tuple(tokens[place + i % period] for i in range(num_tokens))

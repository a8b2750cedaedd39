"""Speculative decoding: verifies a draft of several tokens in one forward pass.

A draft (from prompt lookup, or a smaller model of a cascade) is computed together with the
sequence's last tokens. At each position a token is sampled as if the draft were right up to there.
So all tokens up to the first one that differs from the draft are the tokens that the engine would
have generated step by step. This holds for greedy decoding and for sampling, because the noise
depends only on seed and position. The rest is ignored; its KV is beyond `num_computed` and is
overwritten by the next step (Leviathan et al., 2023, for a draft without probabilities).

This module decides how much of a draft is computed, and how far the sequence advances. A draft uses
only tokens of a step and free blocks that are left over: no sequence is preempted for a draft.
Knows no device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.block_tables import extend, publish, trim
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import SampledToken
from disagg.messages import SamplingParams, TokenLogprobs

# The limit holds for all sequences of a step, as each draft token costs a row of logits that is as
# wide as the vocabulary.
MAX_AHEAD = 128


def usable(sequence: Sequence, draft: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The part of a draft that can be accepted: valid token ids, with room for one token after."""
    num_places = max(0, sequence.max_num_tokens - 1 - len(sequence.tokens))
    draft = draft[:num_places]
    unknown = (i for i, token_id in enumerate(draft) if not 0 <= token_id < vocab_size)
    return draft[: next(unknown, len(draft))]


def claim(pool: BlockPool, sequence: Sequence, limit: int, num_spare_blocks: int) -> int:
    """Decide how many tokens of its draft a sequence computes in this step.

    Allocates blocks for them, at most `num_spare_blocks`. A draft without room is dropped.
    """
    num_tokens, draft = len(sequence.tokens), sequence.draft
    num_ahead = min(len(draft), limit)
    num_slots, num_groups = sequence.num_slots, pool.groups.num_groups
    num_rows = pool.groups.num_rows(num_tokens + num_ahead) - num_slots // pool.block_size
    if 0 < num_rows * num_groups <= num_spare_blocks:
        extend(pool, sequence, num_rows)
    num_ahead = min(num_ahead, sequence.num_slots - num_tokens)
    if num_ahead <= 0:
        sequence.draft = ()
        return 0
    return num_ahead


def gain(
    pool: BlockPool, sequence: Sequence, verified: tuple[SampledToken, ...]
) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...] | None]:
    """Advance a sequence by the verified tokens, as far as its draft is right.

    Args:
        verified: the token after the sequence's last one, and the token after each of the first
            len(verified) - 1 tokens of its draft.

    Returns:
        The tokens that it gains, and their log-probabilities if these were requested.
    """
    tokens, draft = sequence.tokens, sequence.draft
    num_gained, is_right = 0, True
    while is_right and num_gained < len(verified):
        token_id = verified[num_gained].token_id
        tokens.append(token_id)
        is_right = draft[num_gained : num_gained + 1] == (token_id,)
        num_gained += 1
        if sequence.finish_reason() is not None:
            break
    sequence.num_computed = len(tokens) - 1
    if sequence.num_computed >= sequence.publish_at:
        publish(pool, sequence)
    sequence.draft = draft[num_gained:] if is_right else ()
    if not sequence.draft:
        trim(pool, sequence)
    gained = verified[:num_gained]
    logprobs = tuple(token.logprobs for token in gained if token.logprobs is not None)
    return tuple(token.token_id for token in gained), logprobs or None


class DraftedSequence:
    """A sequence as it will be if the first `num_ahead` tokens of its draft are right.

    It has the attributes that a sampler reads of a sequence, for one row of the logits.
    """

    __slots__ = ("num_ahead", "num_prompt_tokens", "sampling", "sequence", "slot", "stop_ids")

    def __init__(self, sequence: Sequence, num_ahead: int) -> None:
        self.sequence = sequence
        self.num_ahead = num_ahead
        self.sampling: SamplingParams = sequence.sampling
        self.slot = sequence.slot
        self.stop_ids = sequence.stop_ids
        self.num_prompt_tokens = sequence.num_prompt_tokens

    @property
    def drafted(self) -> tuple[int, ...]:
        return self.sequence.draft[: self.num_ahead]

    @property
    def tokens(self) -> list[int]:
        return [*self.sequence.tokens, *self.drafted]

    @property
    def num_tokens(self) -> int:
        return len(self.sequence.tokens) + self.num_ahead

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens


Continued: TypeAlias = Sequence | DraftedSequence  # one row of logits chooses its next token


def rows(sequence: Sequence, end: int) -> Iterator[Continued]:
    """The sequence of each of its rows of logits in a step that computes it up to position `end`.

    The drafted ones come last. There are none if the step ends before the sequence's last token.
    """
    num_ahead = end - len(sequence.tokens)
    if num_ahead >= 0:
        yield sequence
        for i in range(1, num_ahead + 1):
            yield DraftedSequence(sequence, i)

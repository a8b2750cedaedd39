"""A request inside one engine: its tokens so far, and how many of them have KV.

A sequence has no phases: prefill, decode, prefix hits, recomputation and imported KV differ only in
the value of `num_computed`. Knows nothing of block states, steps or devices.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from disagg.blocks import BlockHash
from disagg.engine.sched.ngrams import Ngrams
from disagg.engine.sched.thinking import ThinkingState
from disagg.messages import FinishReason, GenerateRequest, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from disagg.engine.sched.grammar import GrammarState

NO_SLOT = -1


@lru_cache(maxsize=64)
def _as_set(token_ids: tuple[int, ...]) -> frozenset[int]:
    """The stop tokens as a set, one object for all sequences that have the same.

    The set is read for every token, and one shared object stays in the CPU's cache.
    """
    return frozenset(token_ids)


class Sequence:
    """Mutable state of one request; only the thread that owns the engine touches it.

    tokens: the prompt, then every token generated so far, here or on another worker.
    draft: tokens that are proposed to come next; see `speculation`.
    num_computed: number of leading tokens with KV in `block_ids`; below len(tokens) until the
        sequence ends.
    block_ids: blocks of which the sequence is a holder; block i has the positions from
        i * block_size on.
    block_hashes: hashes of full blocks, extended as blocks fill up with generated tokens.
    num_listed: number of leading blocks that are in the runner's table at `slot`.
    num_published: number of leading blocks that were offered to the pool's prefix cache.
    arrival: place in every queue: (priority, number given by the scheduler, or -1 before that).
    num_cached_tokens: tokens that were found in the prefix cache when it was first admitted.
    hand_over: whether the sequence leaves this engine, with its blocks, after one token.
    grammar_state: state of the answer in its grammar, if it has one; used by the runner.
    needs_host: whether the host must read a token before the next one can be chosen.
    thinking: state of the reasoning; None: nothing depends on it, or no longer.
    prompt_logprobs: log-probabilities of the computed prompt tokens but the first, if they were
        requested and the answer has not begun; used by the runner. Until then no cached prefix is
        used.
    ngrams: the positions of its n-grams, for `prompt_lookup`.
    slot: its row in the runner's tensors of running sequences; see `slots`.
    max_num_tokens, stop_ids: when the sequence ends; set by the scheduler on submission.
    stream_since: start of its TPOT, and its number of tokens then; None: it does not decode yet.
    """

    __slots__ = (
        "__weakref__",
        "arrival",
        "block_hashes",
        "block_ids",
        "deadline_unix_s",
        "draft",
        "grammar_state",
        "hand_over",
        "hash_root",
        "max_num_tokens",
        "min_num_tokens",
        "needs_host",
        "ngrams",
        "num_cached_tokens",
        "num_computed",
        "num_listed",
        "num_prompt_tokens",
        "num_published",
        "num_queued",
        "num_slots",
        "prompt_logprobs",
        "publish_at",
        "request_id",
        "sampling",
        "slot",
        "stop_ids",
        "stream_since",
        "thinking",
        "tokens",
        "tpot_slo_s",
        "was_admitted",
    )

    def __init__(self, request: GenerateRequest, *, hand_over: bool = False) -> None:
        sampling: SamplingParams = request.sampling
        self.request_id = request.request_id
        self.sampling = sampling
        self.tokens: list[int] = list(request.token_ids)
        self.thinking: ThinkingState | None = None
        if sampling.thinking is not None:
            self.thinking = ThinkingState(sampling.thinking, request.num_prompt_tokens)
        # In an answer under a grammar each token's mask depends on the tokens before it.
        self.draft: tuple[int, ...] = request.draft_token_ids if self.takes_drafts else ()
        self.num_prompt_tokens = request.num_prompt_tokens
        self.num_computed = 0
        self.block_ids: list[int] = []
        self.num_slots = 0  # len(block_ids) * block_size
        self.hash_root = request.hash_root
        self.block_hashes: list[BlockHash] = list(request.block_hashes)
        self.num_published = 0
        self.num_queued = 0  # its tokens in `Queues.num_queued_tokens`
        self.publish_at = 0  # num_computed at which the next block is full
        self.deadline_unix_s = request.deadline_unix_s
        self.arrival = (request.priority, -1)
        self.was_admitted = False
        self.num_cached_tokens = 0
        self.hand_over = hand_over
        self.grammar_state: GrammarState | None = None
        self.ngrams: Ngrams | None = None
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if request.scores_prompt else None
        self.needs_host = self._has_rules or self.thinking is not None
        self.slot = NO_SLOT
        self.num_listed = 0
        self.max_num_tokens = request.num_prompt_tokens + sampling.max_tokens
        self.min_num_tokens = request.num_prompt_tokens + sampling.min_tokens
        self.stop_ids = _as_set(sampling.stop_token_ids)
        self.tpot_slo_s = request.tpot_slo_s or math.inf
        self.stream_since: tuple[float, int] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def takes_drafts(self) -> bool:
        """Whether it can use drafts. It cannot if a token's mask depends on the tokens before."""
        return self.sampling.grammar is None and self.thinking is None

    @property
    def _has_rules(self) -> bool:
        # Bad words of one token do not depend on the tokens before.
        long_words = any(len(word) > 1 for word in self.sampling.bad_words_token_ids)
        is_scored = self.prompt_logprobs is not None
        return self.sampling.grammar is not None or long_words or is_scored

    def watch_thinking(self, num_tokens: int) -> None:
        """Update `thinking` and `needs_host` for the next `num_tokens` tokens.

        The device needs the host only when a reasoning budget may be used up.
        """
        thinking = self.thinking
        if thinking is None or self.sampling.grammar is not None:
            return
        if thinking.is_over(self.tokens):
            self.thinking = None
        self.needs_host = self._has_rules or thinking.is_near_budget(self.tokens, num_tokens)

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Take `prompt_logprobs` when the answer begins; None if they were not requested."""
        scored, self.prompt_logprobs = self.prompt_logprobs, None
        if scored is None:
            return None
        self.needs_host = self._has_rules or self.thinking is not None
        if len(scored) != self.num_prompt_tokens - 1:
            raise ValueError(f"{self} has log-probabilities for {len(scored)} tokens of its prompt")
        return tuple(scored)

    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ends with its last token, if it does."""
        tokens = self.tokens
        if tokens[-1] in self.stop_ids and len(tokens) >= self.min_num_tokens:
            return "stop"
        return "length" if len(tokens) >= self.max_num_tokens else None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.num_computed}/{len(self.tokens)} tokens,"
            f" {len(self.block_ids)} blocks)"
        )
